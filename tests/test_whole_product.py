"""The tool that runs the whole product: its order, what it keeps between runs, and what its report says."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from optgen.driver import emit, targets
from optgen.runtime.cpu import native
from tests import product
from tests.product import PARAMS, Cell, plan_of, spec_of

ROOT = Path(__file__).parents[1]
CELLS = [Cell(spec, plan, param) for spec in ("adamw", "lion") for plan in ("fp32", "int8") for param in PARAMS]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("whole_product", ROOT / "tools" / "test_full.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["whole_product"] = module
    found.loader.exec_module(module)
    return module


def test_every_pair_comes_before_any_comes_again(tool: ModuleType) -> None:
    order = tool.drawn(CELLS, 7)
    assert Counter(order) == Counter(CELLS)
    assert order == tool.drawn(CELLS, 7) != tool.drawn(CELLS, 8)
    for begin in (0, 4, 8):
        assert len({(c.spec, c.plan) for c in order[begin : begin + 4]}) == 4


def test_a_run_that_was_killed_goes_on(tool: ModuleType, tmp_path: Path) -> None:
    """Half a line at the end is passed over and closed."""
    path, kept = tmp_path / "build" / "kept.jsonl", tool.kept
    kept.Kept(path, "now").add("one", "a", {"weight": 0.5})
    with path.open("a") as file:
        file.write('{"item": "one", "sta')
    kept.Kept(path, "now").add("two", "b", {"weight": 0.25})
    found = kept.Kept(path, "now")
    assert [found.now(item)["result"] for item in ("one", "two")] == [{"weight": 0.5}, {"weight": 0.25}]
    assert kept.Kept(path, "now", fresh=True).now("one") is None


def test_a_result_of_other_sources_is_taken_for_the_same_key(tool: ModuleType, tmp_path: Path) -> None:
    """And it is still said of which sources it is, however often it is taken."""
    path, kept = tmp_path / "kept.jsonl", tool.kept
    kept.Kept(path, "first").add("one", "a", {"weight": 0.5})
    second = kept.Kept(path, "second")
    assert second.now("one") is None
    row = second.of_key("one")["a"]
    assert row["result"] == {"weight": 0.5} and "b" not in second.of_key("one")
    second.add("one", "a", row["result"], row["of"])
    assert kept.Kept(path, "second").now("one")["of"] == "first"


def test_the_key_of_a_cell_says_what_its_result_depends_on(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the same sources, another for other text or for another file that it reaches; comments are none."""
    cell, other = Cell("lion", "bf16"), Cell("lion", "bf16_sr")
    key = tool.key_of(cell)
    assert key == tool.key_of(cell) != tool.key_of(other)
    monkeypatch.setattr(product, "printed", lambda cell, real=product.printed: ["# moved", *real(cell)])
    product.build.cache_clear()
    assert tool.key_of(cell) != key
    monkeypatch.undo()
    monkeypatch.setattr(tool, "run_cell", lambda cell: tool.Outcome(cell))  # asks nothing of it
    assert tool.key_of(cell) != key
    monkeypatch.undo()
    assert tool.kept.code_of("# moved\nx = 1") == tool.kept.code_of("# elsewhere\nx = 1") == "x = 1"
    assert tool.kept.code_of('// moved\n#include "x"') == '#include "x"'
    reached: list[frozenset[str]] = []
    monkeypatch.setattr(tool.kept, "reach", lambda roots: reached.append(roots) or "")
    tool.key_of(cell)
    tool.key_of(Cell("lamb", "bf16"))
    one, several = reached
    runtime = {"optgen.runtime.reference.eager", "optgen.runtime.gpu.prelude", "optgen.runtime.cpu.native"}
    assert {"specs.lion", *runtime} <= one
    assert "optgen.verify.differential" in one and "optgen.runtime.optimizer" in several - one


def test_what_is_reached_is_what_is_imported(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through any number of files, and the C++ headers behind the module that reads them."""
    kept = tool.kept
    files = {"a": "from optgen import b", "b": "import optgen.runtime.cpu.native", "c": "", "runtime/cpu/native": ""}
    for name, text in files.items():
        (tmp_path / "optgen" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "optgen" / f"{name}.py").write_text(text)
    (tmp_path / "optgen" / "runtime" / "cpu" / "cpp").mkdir()
    header = tmp_path / "optgen" / "runtime" / "cpu" / "cpp" / "optgen.h"
    header.write_text("")
    monkeypatch.setattr(kept, "ROOT", tmp_path)

    def reached() -> str:
        kept.reach.cache_clear()
        kept._imports.cache_clear()
        return kept.reach(frozenset({"optgen.a"}))

    before = reached()
    (tmp_path / "optgen" / "c.py").write_text("changed = True")
    assert reached() == before
    seen = {before}
    for path in (header, tmp_path / "optgen" / "b.py", tmp_path / "optgen" / "runtime" / "cpu" / "native.py"):
        path.write_text(path.read_text() + "\n")
        seen.add(reached())
    assert len(seen) == 4
    monkeypatch.undo()
    kept.reach.cache_clear()
    kept._imports.cache_clear()


KERNELS = """
import triton, triton.language as tl
from optgen.runtime.gpu.prelude import get, put
@triton.jit
def {rule}_tile({old}, at, {step}, MASKED: tl.constexpr):
    # {rule}
    {new} = tl.load({old} + at) {sign} {step}
    tl.store({old} + at, {new})
@triton.jit
def {rule}(table, work, {step}, N: tl.constexpr):
    \"\"\"{rule}\"\"\"
    {rule}_tile(table, tl.arange(0, N), {step}, {masked})
"""
NAMES = {"rule": "a", "old": "x", "new": "y", "step": "lr", "sign": "-", "masked": "False"}


def test_kernels_of_one_meaning_have_one_fingerprint(tool: ModuleType, tmp_path: Path) -> None:
    """Names and comments do not count; what a kernel and the functions that it calls do and what they import does."""
    pytest.importorskip("triton")
    numbers = iter(range(100))

    def printed(text: str = KERNELS, **other: str) -> str:
        names = NAMES | other
        module = tool._module(tmp_path / f"k{next(numbers)}.py", text.format(**names))
        return tool.kept.fingerprint(getattr(module, names["rule"]))

    first = printed()
    assert first == printed(rule="b", old="u", new="v", step="w") == printed(new="at_once")
    others = [printed(sign="+"), printed(masked="True"), printed(new="x")]
    others.append(printed(KERNELS.replace("tl.load({old} + at)", "get({old}, at, at, MASKED)")))
    others.append(printed(KERNELS.replace("tl.load({old} + at)", "put({old}, at, at, MASKED)")))
    constant = KERNELS.replace("@triton.jit", "C = tl.constexpr({number})\n@triton.jit", 1).replace("+ at)", "+ C)")
    others += [printed(constant, number="3"), printed(constant, number="4")]
    assert len({first, *others}) == 8
    with pytest.raises(ValueError, match="by name"):
        printed(masked="MASKED=False")


def test_what_a_kernel_gave_is_there_for_other_processes(tool: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "build" / "kernels.sqlite"
    one, other = tool.kept.CompiledKernels(path), tool.kept.CompiledKernels(path)
    one.put("a", 16, 0, 8)
    assert other.get("a") == (16, 0, 8) and other.get("b") is None
    other.put("a", 0, 0, 4)  # two that began at once
    assert one.get("a") == (0, 0, 4)
    one.close()
    other.close()


def test_of_eight_cells_about_one_runs_kernels_as_users_compile_them() -> None:
    """The others differ in optimization alone: nothing that decides bits is left out."""
    cells = [Cell(spec, plan, param) for spec in product.SPECS for plan in product.PLANS for param in PARAMS]
    assert 1 / 9 < sum(map(product.optimized, cells)) / len(cells) < 1 / 7
    users = native.FLAGS
    for cell in (next(c for c in cells if product.optimized(c) == wanted) for wanted in (False, True)):
        with product.compiled_for(cell):
            ours = native.FLAGS
        # The last two name what was read of the system's headers, for each way to compile by itself.
        same = set(users[:-2] if "-include" in users else users) - {"-O3"}
        same -= {flag for flag in users if flag.startswith("-W")}
        assert ours == users if product.optimized(cell) else same <= set(ours) and "-O3" not in ours
    assert users is native.FLAGS


def test_a_run_that_is_told_to_end_finishes_what_it_has_begun(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "STOPPED", threading.Event())
    found = {}
    for item, result in tool.spread(abs, [-1, -2, -3, -4], 2, "numbers", math.inf):
        tool.STOPPED.set()
        found[item] = result
    assert found == {-1: 1, -2: 2}


def test_the_report_says_what_was_run_and_what_fails(tool: ModuleType) -> None:
    good, bad = Cell("adamw", "fp32"), Cell("lamb", "fp32")
    outcomes = [tool.Outcome(good, 0.5, 0.25), tool.Outcome(bad, failure="outside the bound: p\nmore", stages=True)]
    text = tool.report_of_cells(outcomes, tool.Extent(1000, 3, 10, "abc1234"))
    assert "This is a sample: 2 of 1000 cells" in text and "drawn by seed\n3:" in text
    assert "**1 of 2 cells are right**" in text and "2 of 10 pairs" in text and "states of the sources" not in text
    assert "commit abc1234." in text
    older = tool.report_of_cells(outcomes, tool.Extent(1000, 3, 10, "abc1234", states=3))
    assert "are of 3 states of the sources" in older
    assert f"- {bad}: outside the bound: p\n" in text
    assert "sample" not in tool.report_of_cells(outcomes, tool.Extent(2, 3, 2, "abc1234"))


def test_the_report_on_kernels_says_what_was_compiled(tool: ModuleType) -> None:
    pairs = [("adamw", "fp32"), ("lamb", "fp32")]
    turns = [tool.Turn(pair, number, 3) for number in range(3) for pair in pairs]
    some, all_of_them = (
        tool.report_of_kernels([tool.Kernels(turn, dict.fromkeys(tool.TARGETS, 2)) for turn in turns[:count]], extent)
        for count, extent in ((3, tool.Extent(2, 3, 2, "abc1234")), (6, tool.Extent(2, 3, 2, "abc1234")))
    )
    assert "of the kernels of each of 2 pairs" in some and "**24 of 24 compile**, of commit abc1234." in some
    assert "drawn\nby seed 3, the first 1 of 2, the first 4 of 1, and all of 0.\n" in some
    assert "all kernels of all 2 pairs of rule and plan." in all_of_them and "sample" not in all_of_them
    spilled, failed = ["a for sm_80: 8 B of stack, 0 B shared"], ["b for sm_90: ValueError: no"]
    made = tool.Kernels(turns[0], dict.fromkeys(tool.TARGETS, 1), dict.fromkeys(tool.TARGETS, 0), spilled, failed)
    made.widened["sm_100"] = 1
    text = tool.report_of_kernels([made], tool.Extent(1, 3, 1, "abc1234"))
    rows = [line for line in text.splitlines() if line.startswith(("| sm_", "| gfx"))]
    assert rows == ["| sm_80 | 1 | 0 | 1 | 0 |", "| sm_90 | 1 | 1 | 0 | 0 |", "| sm_100 | 1 | 0 | 0 | 1 |", "| gfx942 | 1 | 0 | 0 | 0 |"]  # fmt: skip  # noqa: E501
    assert "process died" in tool.report_of_kernels([made], tool.Extent(2, 3, 2, "abc1234"), ["x: a process died"])
    assert "**4 of 5 compile**" in text and f"- {spilled[0]}" in text and f"## What fails\n\n- {failed[0]}" in text


def test_what_never_began_leaves_the_last_report(tool: ModuleType, tmp_path: Path) -> None:
    results = tool.kept.Kept(tmp_path / "kept.jsonl", "now")
    asked = argparse.Namespace(seed=0, sample=None, jobs=1)
    assert tool.run_kernels(results, asked, -math.inf) == ("", False)


def test_a_turn_whose_process_died_was_not_done(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [("adamw", "fp32"), ("lamb", "fp32")]
    monkeypatch.setattr(tool, "pairs_with_kernels", lambda seed: pairs)
    lost = tool.Turn(pairs[1], 2, 0)
    done = {turn: tool.Kernels(turn) for pair in pairs for turn in (tool.Turn(pair, n, 0) for n in range(3))}
    given = [(turn, "a process died" if turn == lost else made) for turn, made in done.items()]
    monkeypatch.setattr(tool, "spread", lambda *_: given)
    asked = argparse.Namespace(seed=0, sample=None, jobs=1)
    text, failed = tool.run_kernels(tool.kept.Kept(tmp_path / "kept.jsonl", "now"), asked, math.inf)
    assert failed and "and all of 1." in text and f"- {lost}: a process died" in text


def test_a_kernel_that_uses_the_stack_makes_a_run_fail(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = tool.Turn(("adamw", "fp32"), 0, 0)
    monkeypatch.setattr(tool, "pairs_with_kernels", lambda seed: [turn.pair])
    asked = argparse.Namespace(seed=0, sample=1, jobs=1)
    for spilled in ([], ["k for sm_90: 8 B of stack, 0 B shared"]):
        monkeypatch.setattr(tool, "spread", lambda *_, s=spilled: [(turn, tool.Kernels(turn, spilled=s))])
        results = tool.kept.Kept(tmp_path / f"{len(spilled)}.jsonl", "now")
        assert tool.run_kernels(results, asked, math.inf)[1] == bool(spilled)


def test_rules_that_multiply_matrices_have_kernels_too(tool: ModuleType) -> None:
    """Their cells are not run (test_whole_model.py holds them to theirs)."""
    pairs = tool.pairs_with_kernels(0)
    assert len(set(pairs)) == len(pairs) and {"muon", "normuon", "adamw"} <= {spec for spec, _ in pairs}
    assert set(pairs) > set(product.pairs()) and pairs != tool.pairs_with_kernels(1)


def test_a_kernel_that_spills_is_compiled_as_the_first_step_does(tool: ModuleType) -> None:
    pytest.importorskip("triton")
    import kernel_stats

    calls: list[object] = []

    def made(*_: object, maxnreg: int = 255, listed: bool, **options: object) -> kernel_stats.Compiled:
        calls.append(maxnreg)
        return kernel_stats.Compiled("k", kernel_stats.TARGETS["sm_90"], 1, "", maxnreg, 0, max(0, 100 - maxnreg))

    job = kernel_stats.Job("k", None, {}, {}, 256, options={"maxnreg": 64})
    with mock.patch.object(kernel_stats, "compile_for", made):
        planned, fitting = kernel_stats.compiled_to_fit(job, "sm_90")
    assert calls == [64, 72, 80, 88, 96, 104] and (planned.stack, fitting.stack) == (36, 0)


def test_the_turns_of_a_pair_take_each_of_its_kernels_once(tool: ModuleType) -> None:
    names = [f"k{n}" for n in range(9)] * 2  # a kernel has a job for each target
    turns = [tool.Turn(("adamw", "fp32"), number, 0).of(names) for number in range(len(tool.TURNS))]
    assert [len(turn) for turn in turns] == [1, 3, 5]
    assert set().union(*turns) == set(names)
    assert turns == [tool.Turn(("adamw", "fp32"), number, 0).of(reversed(names)) for number in range(3)]
    firsts = {frozenset(tool.Turn(("adamw", plan), 0, 0).of(names)) for plan in product.PLANS}
    assert len(firsts) > 3  # not the same of every pair


def test_every_kernel_of_a_pair_is_compiled_for_every_target(tool: ModuleType, tmp_path: Path) -> None:
    """Those that walk panels and those between sweeps too: all that has a table and a list of work to go through."""
    pytest.importorskip("triton")
    spec, plan = spec_of("adamw"), plan_of("lpmm4")
    cases = [c for c in targets.cases(spec, plan) if c.storage.param.torch == "bfloat16" and not c.small]
    text = emit.emit_plan(spec, plan, cases=[next(c for c in cases if c.vector == v) for v in (False, True)])
    module = tool._module(tmp_path / "kernels.py", text["triton_kernels.py"])
    import kernel_stats

    jobs = kernel_stats.of_module("adamw.lpmm4", module)
    made = [(job.fn.__name__, target) for job in jobs for target in job.targets]
    kernels = re.findall(r"^def (\w+)\(\s*table, work", text["triton_kernels.py"], re.M)
    assert {name.removeprefix("adamw_bfloat16_") for name in kernels} >= {"1", "2", "2_flat", "3", "6", "7", "vector"}
    assert sorted(made) == sorted((name, target) for name in kernels for target in tool.TARGETS)


SAMPLE = """
import json, random, sys
from pathlib import Path

import test_full as tool
from optgen.driver import targets
from tests import product

seed, tool.COMPILED = int(sys.argv[1]), Path(sys.argv[2])
for spec, plan in json.load(sys.stdin):
    pair = spec, plan
    case = random.Random(f"{seed} {pair}").choice(list(targets.cases(product.spec_of(spec), product.plan_of(plan))))
    made = tool.compile_turn(tool.Turn(pair, 0, seed), [case])
    print(json.dumps({"pair": pair, "compiled": made.compiled, "failed": made.failed}))
"""
PARTS = 4
SAMPLED = 3


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_rules_and_plans_compile_for_every_target(compiling: dict[str, str], tmp_path: Path, part: int) -> None:
    """Every rule under the default plan, every plan under AdamW, and some other pairs: one drawn kernel of each.

    `tools/test_full.py` compiles all of them.
    """
    pytest.importorskip("triton")
    seed = os.environ["OPTGEN_SAMPLE_SEED"]
    daily = product.daily_pairs(product.WITH_MATRICES)
    others = [pair for pair in product.pairs(product.WITH_MATRICES) if pair not in daily]
    pairs = daily + random.Random(int(seed)).sample(others, SAMPLED)
    env = {**compiling, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    command = [sys.executable, "-c", SAMPLE, seed, str(tmp_path / "kernels.sqlite")]
    asked = pairs[part::PARTS]
    done = subprocess.run(
        command, cwd=ROOT, env=env, input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(row["pair"]) for row in rows] == asked
    for row in rows:
        assert not row["failed"], row
        assert min(row["compiled"].values()) >= 1, row
