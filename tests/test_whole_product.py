"""The whole product of rules, plans, parameter dtypes, flags and targets: an item of pytest is a rule, marked `full`.

Every cell is compiled in memory.  The strict Triton kernels, in Triton's interpreter, the strict C++ kernels and the
eager reference must agree bit for bit: kernel by kernel where a step is one, the whole optimizer where it takes
several.  Each step must keep the bound that is derived for it, around the fp64 oracle.  Every fast kernel is compiled
for every target, and the PTX of drawn strict ones is executed (tests/ptx/cell.py).

OPTGEN_CELLS=1 runs one drawn cell of each pair of rule and plan, and one of its kernels; a larger number begins with
the same ones.  What is right is kept in build/whole_product for the sources that it is of, where the next run goes on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
from tests.product import PLANS, SPECS, WITH_MATRICES, Cell

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
    own = ("product", "harness", "training", "interpreter", "test_whole_product")
    files += [ROOT / "tests" / f"{name}.py" for name in own]
    by = native.compiler()
    versions = [torch.__version__, metadata.version("triton"), metadata.version("numpy")]  # the interpreter's numbers
    digest = hashlib.sha256(repr([*versions, by and by.version, native.isa().name]).encode())
    for path in sorted([*files, ROOT / "tools" / "kernel_stats.py"]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return ROOT / "build" / "whole_product" / digest.hexdigest()[:16]


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
    path, wrong = kept() / f"{kind}.{rule}.txt", list[str]()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    with path.open("a", encoding="utf-8", buffering=1) as right:
        for name, result in in_processes(function, {k: job for k, job in jobs.items() if k not in known}):
            if result["wrong"]:
                wrong.append(f"{name}: {'; '.join(result['wrong'])}")
            else:
                right.write(f"{name}\n")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(jobs)} are wrong", *wrong])


def first(items: Iterable[Any], *draw: str) -> list[Any]:
    """Return the items of a pair of rule and plan in an order that the draw names, OPTGEN_CELLS of them."""
    order = sorted(items, key=str)
    random.Random(f"{draw}").shuffle(order)
    return order[: int(os.environ.get("OPTGEN_CELLS", len(order)))]


# Cells ----------------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell) -> dict[str, Any]:
    """Compile and run one cell, in a process that interprets Triton; return what is wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy's, of the interpreter casting lanes that are not selected
    interpreter.quicken()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, OPTGEN_CACHE=folder), harness.unoptimized():
        try:
            reports = product.check(cell, Path(folder), steps=STEPS)
            stages = product.build(cell).in_stages
            different = product.differing(cell, Path(folder), steps=STEPS) if stages else []
        except Exception as error:  # any failure belongs to the result of its cell
            return {"wrong": [f"{type(error).__name__}: {error}"]}
    return {"wrong": sorted({f"{name} outside the bound" for report in reports for name in report.broken}) + different}


@pytest.mark.full
@pytest.mark.parametrize("rule", SPECS)
def test_cells_are_right(rule: str) -> None:
    """Rules with products of matrices have no bound and are tested elsewhere (tests/test_whole_model.py)."""
    cells = [c for plan in PLANS for c in first(filter(product.is_met, product.cells_of(rule, plan)), rule, plan)]
    check_all("cells", rule, run_cell, {str(c): c for c in cells})


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
    """Cross-compile kernels, in a process that compiles; return how many were compiled by target, and what is wrong.

    One that uses the stack is wrong, and one of tiles that shares memory; those that walk panels, or work between
    sweeps, share it by design.
    """
    from tools import kernel_stats

    torch.set_num_threads(1)
    compiled, wrong = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        jobs = list(asked.jobs(Path(folder)))
        taken = first({job.name for job in jobs}, asked.rule, asked.plan, *asked.draw)
        for job, target in ((j, t) for j in jobs for t in j.targets if t in asked.targets and j.name in taken):
            try:
                _, made = kernel_stats.compiled_to_fit(job, target)
            except Exception as error:  # any failure belongs to the result of its kernel
                wrong.append(f"{job.name} for {target}: {type(error).__name__}: {str(error)[:200]}")
                continue
            compiled[target] += 1
            if made.stack or (made.shared and job.tiled):
                wrong.append(f"{job.name} for {target}: {made.stack} B of stack, {made.shared} B shared")
    return {"compiled": compiled, "wrong": wrong}


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


def test_a_thirtieth_of_the_rules_compiles(compiling: dict[str, str]) -> None:
    """Every thirtieth rule, each with the next plan, from drawn ones on: a drawn kernel, for the targets in turn."""
    pytest.importorskip("triton")
    seed = int(os.environ["OPTGEN_SAMPLE_SEED"])
    by_plans, by_targets = seed // 30, seed // 30 // len(PLANS)  # every rule meets every plan, and they every target
    asked = []
    for k, rule in enumerate(WITH_MATRICES[seed % 30 :: 30]):
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

TRITONS = {"3.9": ("", (90, 80, 90, 100)), "3.6": (str(Path(sys.prefix) / "oldest"), (90, 80))}
"""Versions of Triton: the folder that comes before others on the path of modules, where `make setup` puts the oldest
one that is supported, and the GPUs that the cells are compiled for, drawn.  The assembler of 3.6 fuses additions for
sm_100 (docs/kernels.md)."""

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
        found.append(Emulation(draw.choice(cells), triton, draw.choice(TRITONS[triton][1])))
    return found


def emulate(asked: Emulation) -> dict[str, Any]:
    """Train a cell in a process with its version of Triton."""
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": cache}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [TRITONS[asked.triton][0], str(ROOT)]))}
        command = [sys.executable, "-W", "ignore", "-m", "tests.ptx.cell"]
        given = json.dumps([asdict(asked.cell), asked.capability])
        done = subprocess.run(command, cwd=ROOT, env=env, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"wrong": [f"the process has died: {done.stderr[-500:]}"]}
    return dict(json.loads(done.stdout))


@pytest.mark.full
@pytest.mark.parametrize("rule", [*WITH_MATRICES, *WRAPPED])
def test_compiled_kernels_have_the_bits_of_the_reference(rule: str) -> None:
    pytest.importorskip("triton")
    there = [x for x in emulations(rule) if Path(TRITONS[x.triton][0]).exists()]
    check_all("ptx", rule, emulate, {str(x): x for x in there})
