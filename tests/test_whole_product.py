"""The tool that runs the whole product: the results it keeps between runs, and the kernels that it compiles."""

import argparse
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from optgen.driver import targets
from optgen.lang import wrappers
from optgen.runtime.cpu import native
from tests import harness, product
from tests.product import PARAMS, Cell, plan_of, spec_of
from tools import test_full as tool

ROOT = Path(__file__).parents[1]


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Half a line at the end is passed over and closed; results of other sources are not taken."""
    path = tmp_path / "build" / "results.jsonl"
    tool.Results(path, "now").add("one", {"weight": 0.5})
    with path.open("a") as file:
        file.write('\n["two", "no')
    tool.Results(path, "now").add("two", {"weight": 0.25})
    assert tool.Results(path, "now").known == {"one": {"weight": 0.5}, "two": {"weight": 0.25}}
    assert tool.Results(path, "later").known == tool.Results(path, "now", fresh=True).known == {}


def test_of_eight_cells_about_one_runs_kernels_as_users_compile_them() -> None:
    """The others differ in optimization alone: nothing that decides bits is left out."""
    cells = [Cell(spec, plan, param) for spec in product.SPECS for plan in product.PLANS for param in PARAMS]
    assert 1 / 9 < sum(map(product.optimized, cells)) / len(cells) < 1 / 7
    before = native.FLAGS
    with harness.optimized():
        users = native.FLAGS
    for cell in (next(c for c in cells if product.optimized(c) == wanted) for wanted in (False, True)):
        with product.compiled_for(cell):
            ours = native.FLAGS
        # The last two name what was read of the system's headers, for each way to compile by itself.
        same = set(users[:-2] if "-include" in users else users) - {"-O3"}
        same -= {flag for flag in users if flag.startswith("-W")}
        assert ours == users if product.optimized(cell) else same <= set(ours) and "-O3" not in ours
    assert before is native.FLAGS


@pytest.mark.full  # 77 s
def test_emulated_cells_have_every_rule_twice_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both versions of Triton; failures are listed and fail the run.  A new rule changes no cell of another, and
    results of older sources count until their cells are run again."""
    jobs = tool.emulate.drawn(0)
    rules, plans = (Counter(getattr(job.cell, name) for job in jobs) for name in ("spec", "plan"))
    assert set(rules.items()) == {(rule, 2) for rule in (*product.WITH_MATRICES, *tool.emulate.WRAPPED)}
    assert {rule.split("(")[0] for rule in tool.emulate.WRAPPED} == set(wrappers.__all__)
    assert set(plans) == set(product.PLANS) and min(plans.values()) > 1
    assert len({(job.cell.spec, job.triton) for job in jobs}) == len(jobs)
    assert len({(job.triton, job.capability) for job in jobs}) == 6
    first, *others = product.WITH_MATRICES
    monkeypatch.setattr(product, "WITH_MATRICES", others)
    assert tool.emulate.drawn(0) == [job for job in jobs if job.cell.spec != first]
    kept = {"kernels": 2, "launches": 3}
    for k, job in enumerate(jobs[:4]):
        wrong = [["p of (3, 70)"] * (k == 1), [tool.emulate.DIED]][k == 3]
        results = tool.emulate.Results(tmp_path / "kept.json", f"sources {k // 2}", f"commit {k // 2}")
        results.add(job, kept | {"wrong": wrong})
    results = tool.emulate.Results(tmp_path / "kept.json", "sources 1", "commit 1")
    assert results.rest(jobs) == [*jobs[3:], jobs[1], jobs[0]]  # the wrong one first
    found = {job: results.known[str(job)] for job in jobs[:4]}
    text = tool.emulate.report(found, jobs, 0)
    assert "**2 of 4 cells are right**: 8 compiled kernels in 12 launches" in text
    assert "Commits: commit 0 (2 cells), commit 1 (2 cells)" in text
    assert f"- {jobs[1]}: p of (3, 70)" in text
    fused = {"kernels": 1, "launches": 1, "wrong": ["sweep: 1 FADD for 2 additions"]}
    failing = {(job.triton, job.capability) for job in jobs if tool.emulate.failures(job, fused)}
    assert len(failing) == 5 and ("3.6", 100) not in failing


def test_a_kernel_that_uses_the_stack_makes_a_run_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = tool.Turn(("adamw", "fp32"), 0, 0)
    monkeypatch.setattr(tool, "pairs_with_kernels", lambda seed: [turn.pair])
    asked = argparse.Namespace(seed=0, sample=1, jobs=1)
    for spilled in ([], ["k for sm_90: 8 B of stack, 0 B shared"]):
        monkeypatch.setattr(tool, "spread", lambda *_, s=spilled: [(turn, tool.Kernels(turn, spilled=s))])
        results = tool.Results(tmp_path / f"{len(spilled)}.jsonl", "now")
        assert tool.run_kernels(results, asked, math.inf)[1] == bool(spilled)


def test_every_kernel_of_a_pair_is_compiled_for_every_target(tmp_path: Path) -> None:
    """Kernels that walk panels and kernels between sweeps too: all with a table and a list of work to go through."""
    pytest.importorskip("triton")
    case = next(c for c in targets.cases(spec_of("adamw"), plan_of("lpmm4")) if c.param.torch == "bfloat16")
    jobs = list(tool._jobs(("adamw", "lpmm4"), [case], tmp_path))
    kernels = {job.name.removeprefix("adamw.lpmm4.adamw_bfloat16.") for job in jobs}
    assert kernels == {"1", "2", "2_few", "2_flat", "3", "6", "6_flat", "7"}
    made = sorted((job.name, target) for job in jobs for target in job.targets)
    assert made == sorted({(job.name, target) for job in jobs for target in tool.TARGETS})


SAMPLE = """
import json, random, sys

import test_full as tool
from optgen.driver import targets
from tests import harness, product

seed = int(sys.argv[1])
for spec, plan, target in json.load(sys.stdin):
    pair = spec, plan
    case = random.Random(f"{seed} {pair}").choice(list(targets.cases(product.spec_of(spec), product.plan_of(plan))))
    made = tool.compile_turn(tool.Turn(pair, 0, seed), [case], [target])
    print(json.dumps({"pair": pair, "compiled": made.compiled[target], "failed": made.failed}))
"""


def test_a_quarter_of_the_rules_and_half_of_the_plans_compile(compiling: dict[str, str]) -> None:
    """Every fourth rule, each with the next plan but one, beginning at drawn ones: one drawn kernel, for the targets in
    turn.

    `tools/test_full.py` compiles all kernels of all pairs for all targets.
    """
    pytest.importorskip("triton")
    seed = int(os.environ["OPTGEN_SAMPLE_SEED"])
    rules, plans, targets = product.WITH_MATRICES[seed % 4 :: 4], product.PLANS, tool.TARGETS
    by_plans, by_targets = seed // 4, seed // 4 // len(plans)  # every rule meets every plan, and they every target
    asked = [
        (rule, plans[(by_plans + 2 * k) % len(plans)], targets[(by_targets + k) % len(targets)])
        for k, rule in enumerate(rules)
    ]
    env = {**compiling, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    found = harness.python(SAMPLE, str(seed), env=env, stdin=json.dumps(asked))
    rows = [json.loads(line) for line in found.splitlines()]
    assert [row["pair"] for row in rows] == [[rule, plan] for rule, plan, _ in asked]
    for row in rows:
        assert not row["failed"], row
        assert row["compiled"] >= 1, row
