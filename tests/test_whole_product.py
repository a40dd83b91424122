"""The whole product of rules, plans, parameter dtypes, flags and targets: an item of pytest is a rule, marked `full`.

Every cell is compiled in memory.  The strict Triton kernels, in Triton's interpreter, the strict C++ kernels and the
eager reference must agree bit for bit: kernel by kernel where a step is one, the whole optimizer where it takes
several.  Each step must keep the bound that is derived for it, around the fp64 oracle.  Every fast kernel is compiled
for every target, and the PTX of drawn strict ones is executed (tests/ptx/cell.py).

OPTGEN_CELLS=1 runs one drawn cell of each pair of rule and plan, and one of its kernels; a larger number begins with
the same ones.  What is right is kept in build/whole_product for the sources that it is of, where the next run goes on;
`python -m tests.test_whole_product` prints the sums.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from optgen.driver import targets, triton_text
from optgen.runtime.cpu import native
from tests import harness, interpreter, product
from tests.harness import plan_of, spec_of
from tests.product import PARAMS, PLANS, SPECS, WITH_MATRICES, Cell

ROOT = Path(__file__).parents[1]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
STEPS = 3
TASKS = 64  # of a process, before another takes its place: nodes and loaded kernels are never given back


# Results of earlier runs ----------------------------------------------------------------------------------------------


@functools.cache
def kept() -> Path:
    """Return the folder of results of these sources, of this test, and of the versions that they run with."""
    folders = ("optgen", "specs", "tests/ptx")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc" and p.is_file()]
    files += [ROOT / "tests" / f"{name}.py" for name in ("product", "harness", "interpreter", "test_whole_product")]
    by = native.compiler()
    versions = [torch.__version__, metadata.version("triton"), metadata.version("numpy")]  # the interpreter's numbers
    digest = hashlib.sha256(repr([*versions, by and by.version, native.isa().name]).encode())
    for path in sorted([*files, ROOT / "tools" / "kernel_stats.py"]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return ROOT / "build" / "whole_product" / digest.hexdigest()[:16]


class Results:
    """The results of an item that are right, by name, and the file that new results are added to, a line each."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, dict[str, Any]()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(ValueError):  # the last line of a run that was killed
                name, result = json.loads(line)
                self.known[name] = result

    def add(self, name: str, result: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([name, result]))


def in_processes(function: Callable[..., Any], jobs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and result of each job, one after the other; a process that dies is the result of its job."""
    rest = list(jobs.items())
    while rest:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            for _ in range(min(TASKS, len(rest))):
                name, job = rest.pop(0)
                try:
                    yield name, pool.submit(function, job).result()
                except BrokenProcessPool:
                    yield name, {"wrong": ["the process has died"]}
                    break


def check_all(kind: str, rule: str, function: Callable[..., Mapping[str, Any]], jobs: Mapping[str, Any]) -> None:
    """Run a function of each job that no earlier run found right, in a process beside this one; what it returns lists
    under "wrong" what is."""
    results, wrong = Results(kept() / f"{kind}.{rule}.jsonl"), list[str]()
    for name, result in in_processes(function, {k: job for k, job in jobs.items() if k not in results.known}):
        if result["wrong"]:
            wrong.append(f"{name}: {'; '.join(result['wrong'])}")
        else:
            results.add(name, result)
    assert not wrong, "\n".join([f"{len(wrong)} of {len(jobs)} are wrong", *wrong])


def first(items: Iterable[Any], *draw: str) -> list[Any]:
    """Return the items of a pair of rule and plan in an order that the draw names, OPTGEN_CELLS of them."""
    order = sorted(items, key=str)
    random.Random(f"{draw}").shuffle(order)
    return order[: int(os.environ.get("OPTGEN_CELLS", len(order)))]


# Cells ----------------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell) -> dict[str, Any]:
    """Compile and run one cell, in a process that interprets Triton; return the worst error / bound of weight and
    states, and the least share of values with a bound."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy's, of the interpreter casting lanes that are not selected
    interpreter.quicken()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, OPTGEN_CACHE=folder):
        try:
            reports = product.check(cell, Path(folder), steps=STEPS)
            stages = product.build(cell).in_stages
            different = product.differing(cell, Path(folder), steps=STEPS) if stages else []
        except Exception as error:  # any failure belongs to the result of its cell
            return {"wrong": [f"{type(error).__name__}: {error}"]}
    ratios = [(name, w.ratio) for report in reports for name, w in report.worst.items()]
    return {
        "weight": max((x for name, x in ratios if name == "p"), default=0.0),
        "states": max((x for name, x in ratios if name != "p"), default=0.0),
        "claimed": min(report.claimed for report in reports),
        "wrong": sorted({f"{name} outside the bound" for report in reports for name in report.broken}) + different,
    }


@pytest.mark.full
@pytest.mark.parametrize("rule", SPECS)
def test_cells_are_right(rule: str) -> None:
    """Rules with products of matrices have no bound and are tested elsewhere (tests/test_whole_model.py)."""
    cells = [c for plan in PLANS for c in first(filter(product.is_met, product.cells_of(rule, plan)), rule, plan)]
    check_all("cells", rule, run_cell, {str(c): c for c in cells})


def test_of_eight_cells_about_one_runs_kernels_as_users_compile_them() -> None:
    """The others differ in optimization alone: nothing that decides bits is left out."""
    cells = [Cell(spec, plan, param) for spec in SPECS for plan in PLANS for param in PARAMS]
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


# Kernels --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """Kernels of a pair, to be compiled: of its cases of these names, or of all, for these targets, in this draw."""

    rule: str
    plan: str
    cases: tuple[str, ...] | None = None
    targets: tuple[str, ...] = TARGETS
    draw: tuple[str, ...] = ()

    def jobs(self, folder: Path) -> Iterator[Any]:
        """Yield the kernels."""
        from tools import kernel_stats

        spec, plan = spec_of(self.rule), plan_of(self.plan)
        joined, kernels = triton_text.joined(spec, plan, "fast", functools.partial(harness.module, folder))
        return iter(kernel_stats.of_variants(f"{self.rule}.{self.plan}", joined, kernels, self.cases))


def compile_kernels(asked: Kernels) -> dict[str, Any]:
    """Cross-compile kernels, in a process that compiles; return by target how many were compiled, and how many take
    more registers than planned.  One that uses the stack is wrong, and one of tiles that shares memory; those that
    walk panels, or work between sweeps, share it by design."""
    from tools import kernel_stats

    torch.set_num_threads(1)
    compiled, widened, wrong = Counter[str](), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        jobs = list(asked.jobs(Path(folder)))
        taken = first({job.name for job in jobs}, asked.rule, asked.plan, *asked.draw)
        for job, target in ((j, t) for j in jobs for t in j.targets if t in asked.targets and j.name in taken):
            try:
                planned, made = kernel_stats.compiled_to_fit(job, target)
            except Exception as error:  # any failure belongs to the result of its kernel
                wrong.append(f"{job.name} for {target}: {type(error).__name__}: {str(error)[:200]}")
                continue
            compiled[target] += 1
            widened[target] += planned.stack > made.stack
            if made.stack or (made.shared and job.tiled):
                wrong.append(f"{job.name} for {target}: {made.stack} B of stack, {made.shared} B shared")
    return {"compiled": compiled, "widened": widened, "wrong": wrong}


@pytest.mark.full
@pytest.mark.parametrize("rule", WITH_MATRICES)
def test_kernels_compile_for_every_target(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET")  # processes compile then
    part = "-".join(filter(None, ["kernels", os.environ.get("OPTGEN_CELLS")]))
    check_all(part, rule, compile_kernels, {plan: Kernels(rule, plan) for _, plan in product.pairs([rule])})


SAMPLE = """
import json, sys
from tests.test_whole_product import Kernels, compile_kernels

for rule, plan, case, target in json.load(sys.stdin):
    print(json.dumps(compile_kernels(Kernels(rule, plan, (case,), (target,), (sys.argv[1],)))))
"""


def test_an_eighth_of_the_rules_compile(compiling: dict[str, str]) -> None:
    """Every eighth rule, each with the next plan, beginning at drawn ones: a drawn kernel, for the targets in turn."""
    pytest.importorskip("triton")
    seed = int(os.environ["OPTGEN_SAMPLE_SEED"])
    by_plans, by_targets = seed // 8, seed // 8 // len(PLANS)  # every rule meets every plan, and they every target
    asked = []
    for k, rule in enumerate(WITH_MATRICES[seed % 8 :: 8]):
        plan, target = PLANS[(by_plans + k) % len(PLANS)], TARGETS[(by_targets + k) % len(TARGETS)]
        case = random.Random(f"{seed} {rule}").choice(list(targets.cases(spec_of(rule), plan_of(plan))))
        asked.append((rule, plan, targets.case_name(spec_of(rule), case), target))
    env = {**compiling, "PYTHONPATH": str(ROOT), "OPTGEN_CELLS": "1"}
    found = harness.python(SAMPLE, str(seed), env=env, stdin=json.dumps(asked))
    rows = [json.loads(line) for line in found.splitlines()]
    for row, (*_, target) in zip(rows, asked, strict=True):
        assert not [x for x in row["wrong"] if "B of stack" not in x], row
        assert row["compiled"] == {target: 1}, row


# Compiled kernels, executed without a device --------------------------------------------------------------------------

TRITONS = {"3.9": "", "3.6": str(Path(sys.prefix) / "oldest")}
"""Versions of Triton, and the folder that comes before others on the path of modules: the oldest one that is supported
is there by `make setup`."""

CAPABILITIES = (90, 80, 90, 100)
"""The GPUs that the cells are compiled for, drawn."""

WRAPPED = (
    "adagc(adamw)", "agc(sgd)", "asam(sgd)", "averaged(nadam)", "cautious(lamb)", "cautious_decay(lion)",
    "centralized(radam)", "clipped(adamw)", "clipped_value(lion)", "ema(cautious(adamw))", "ema_nesterov(adamw)",
    "gpa(sgd)", "grams(adamw)", "gsam(lion)", "hyperball(muon)", "lookahead(rmsprop)", "mars(adam)", "orthograd(sgd)",
    "sam(adamw)", "schedule_free(adamw)", "snoo(sgd)", "spam_reset(adamw)", "warmed_up(adafactor)", "zclip(sgd)",
)  # fmt: skip
"""Every wrapper, each around one rule."""


@dataclass(frozen=True)
class Emulation:
    """A cell for a version of Triton and a device."""

    cell: Cell
    triton: str
    capability: int

    def __str__(self) -> str:
        return f"{self.cell} by Triton {self.triton} for sm_{self.capability}"


def emulations(rule: str) -> list[Emulation]:
    """Return drawn cells of a rule, one for each version of Triton."""
    from tests.ptx.cell import SHAPES

    plans = sorted(PLANS, key=lambda plan: zlib.crc32(f"{rule} {plan}".encode()))
    fitting = (plan for plan in plans if rule in SPECS or not product.refusal(rule, plan))
    found = []
    for triton, plan in zip(TRITONS, fitting, strict=False):
        draw = random.Random(f"{rule} {triton}")
        cells = [c for c in product.cells_of(rule, plan) if product.fitting(c, SHAPES)]
        found.append(Emulation(draw.choice(cells), triton, draw.choice(CAPABILITIES)))
    return found


def emulate(asked: Emulation) -> dict[str, Any]:
    """Train a cell in a process with its version of Triton.  Additions that the assembler of CUDA 12.9 fuses are right
    (docs/kernels.md)."""
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": cache}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [TRITONS[asked.triton], str(ROOT)]))}
        command = [sys.executable, "-W", "ignore", "-m", "tests.ptx.cell"]
        given = json.dumps([asdict(asked.cell), asked.capability])
        done = subprocess.run(command, cwd=ROOT, env=env, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"wrong": [f"the process has died: {done.stderr[-500:]}"]}
    found = json.loads(done.stdout)
    fused = r".*( FADD for .*|: FFMA2)" if (asked.triton, asked.capability) == ("3.6", 100) else "(?!)"
    return {**found, "wrong": [word for word in found["wrong"] if not re.fullmatch(fused, word)]}


@pytest.mark.full
@pytest.mark.parametrize("rule", [*WITH_MATRICES, *WRAPPED])
def test_compiled_kernels_have_the_bits_of_the_reference(rule: str) -> None:
    pytest.importorskip("triton")
    there = [x for x in emulations(rule) if not TRITONS[x.triton] or Path(TRITONS[x.triton]).exists()]
    check_all("ptx", rule, emulate, {str(x): x for x in there})


@pytest.mark.parametrize(("triton", "capability"), [(x, sm) for x in TRITONS for sm in (90, 100)])
def test_fused_additions_are_right_of_one_assembler(
    triton: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["k: 3 FADD for 4 add.f32", "k: FFMA2", "k: other bits"]
    done = subprocess.CompletedProcess([], 0, json.dumps({"wrong": words}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = emulate(Emulation(Cell("adamw", "fp32", "float32"), triton, capability))
    assert found["wrong"] == (words[2:] if (triton, capability) == ("3.6", 100) else words)


# What runs have found -------------------------------------------------------------------------------------------------


def summary(folder: Path) -> Iterator[str]:
    """Yield lines of what was found right by these sources."""
    for kind in sorted({path.name.partition(".")[0] for path in folder.glob("*.jsonl")}):
        rows = [row for path in folder.glob(f"{kind}.*.jsonl") for row in Results(path).known.values()]
        how: dict[str, Callable[[Sequence[float]], float]] = {"weight": max, "states": max, "claimed": min}
        found = {key: f"{how[key](numbers):.3f}" for key in how if (numbers := [x[key] for x in rows if key in x])}
        for key in ("compiled", "widened"):
            found |= {key: dict(sum((Counter(x[key]) for x in rows if key in x), Counter()))}
        found |= {key: sum(x[key] for x in rows) for key in ("kernels", "launches") if rows and key in rows[0]}
        yield f"{kind}: {len(rows)} right, {', '.join(f'{key} {x}' for key, x in found.items() if x)}"


if __name__ == "__main__":
    print("\n".join(summary(kept())))
