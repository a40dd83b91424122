"""Test the whole product of rules, plans, parameter dtypes, flags and targets, and write the reports to docs/.

    python tools/test_full.py                     all of it; many hours on a small machine
    python tools/test_full.py --minutes 45        what can be run in that time, of a drawn order (--seed)
    python tools/test_full.py --sample 50         the first 50 of that order, shown only; --write to keep the report
    python tools/test_full.py --only kernels      cross-compile; --only cells, --only ptx: other reports are left as is

Every cell is compiled in memory. The strict Triton kernels, in Triton's interpreter, the strict C++ kernels and the
eager reference must agree bit for bit: kernel by kernel where a step is one, the whole optimizer where it takes
several. Each step must keep the bound that is derived for it, around the fp64 oracle (docs/test-full.md). Every fast
kernel is then compiled for every target (docs/test-full-kernels.md), and the PTX of drawn strict ones is executed
(docs/test-full-ptx.md, tools/emulate.py). Exit code 1 where anything fails.

One of eight cells is run with the C++ kernels that users compile, the others with kernels that are not optimized, which
give the same bits (`harness.unoptimized`).

Cells come in a drawn order: one of every pair of rule and plan, then a second of each, and so on. So do kernels: one of
every pair for all targets, then three more of each, then the rest. Results are kept in build/test_full.jsonl as they
come: an interrupted run of the same sources goes on where it was, and a longer one begins with the results of a shorter
one. SIGTERM ends a run as --minutes does: what is begun is finished, and the report written. --fresh runs all of it
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import emulate  # noqa: E402
import rich.progress  # noqa: E402
import torch  # noqa: E402
from prose import table  # noqa: E402

from optgen.driver.targets import Case, case_name  # noqa: E402
from optgen.runtime.cpu import native  # noqa: E402
from tests import harness, interpreter, product  # noqa: E402
from tests.product import Cell  # noqa: E402

DOC = ROOT / "docs" / "test-full.md"
KERNELS_DOC = ROOT / "docs" / "test-full-kernels.md"
PTX_DOC = ROOT / "docs" / "test-full-ptx.md"
PTX_KEPT = PTX_DOC.with_suffix(".json")
KEPT = ROOT / "build" / "test_full.jsonl"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
STEPS = 3
TURNS = (1, 4, None)  # how many of a pair's kernels are compiled after its first turn, its second ...
TASKS = 64  # of a process, before another takes its place: nodes and loaded kernels are never given back

STOPPED = threading.Event()
"""Set by SIGTERM: nothing new is begun."""

Item = TypeVar("Item")
Result = TypeVar("Result")


# Cells ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One cell: the worst error / bound of weight and states, the share of values with a bound, or what failed."""

    cell: Cell
    weight: float = 0.0
    states: float = 0.0
    claimed: float = 1.0
    failure: str = ""
    stages: bool = False  # whether its step takes several kernels


def run_cell(cell: Cell) -> Outcome:
    """Compile and run one cell, in a process that interprets Triton."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy's, of the interpreter casting lanes that are not selected
    interpreter.quicken()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, OPTGEN_CACHE=folder):
        try:
            reports = product.check(cell, Path(folder), steps=STEPS)
            stages = product.takes_stages(cell)
            different = product.differing(cell, Path(folder), steps=STEPS) if stages else []
        except Exception as error:  # any failure belongs into the report, with its cell
            return Outcome(cell, failure=f"{type(error).__name__}: {error}")
    worst: dict[str, float] = defaultdict(float)
    for report in reports:
        for name, w in report.worst.items():
            kind = "p" if name == "p" else "state"
            worst[kind] = max(worst[kind], w.ratio)
    broken = sorted({name for report in reports for name in report.broken})
    failures = [f"outside the bound: {', '.join(broken)}"] * bool(broken)
    failures += [f"not the reference's: {', '.join(different)}"] * bool(different)
    least = min(report.claimed for report in reports)
    return Outcome(cell, worst["p"], worst["state"], least, "; ".join(failures), stages)


# Kernels --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Kernels of one pair: those from TURNS[number - 1] to TURNS[number] of an order drawn for it."""

    pair: tuple[str, str]
    number: int
    seed: int

    def of(self, names: Iterable[str]) -> set[str]:
        """Return those of the kernels that are compiled in this turn."""
        order = sorted(set(names))
        random.Random(f"{self.seed} {self.pair}").shuffle(order)
        return set(order[TURNS[self.number - 1] if self.number else 0 : TURNS[self.number]])


@dataclass
class Kernels:
    """The kernels of a turn, counted for each target: compiled ones, and those that take more registers than planned;
    and lines about those that use the stack or share memory, and about failures."""

    turn: Turn
    compiled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    widened: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    spilled: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def compile_turn(turn: Turn, cases: Iterable[Case] | None = None, targets: Sequence[str] = TARGETS) -> Kernels:
    """Cross-compile the kernels of a turn, in a process that compiles.

    cases    of the pair that are generated, all by default
    targets  the targets to compile for
    """
    import kernel_stats

    torch.set_num_threads(1)
    out = Kernels(turn)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        jobs = list(_jobs(turn.pair, None if cases is None else list(cases), Path(folder)))
        taken = turn.of(job.name for job in jobs)
        for job, target in ((j, t) for j in jobs for t in j.targets if t in targets and j.name in taken):
            label = f"{job.name} for {target}"
            try:
                planned, made = kernel_stats.compiled_to_fit(job, target)
            except Exception as error:  # any failure belongs into the report, with its kernel
                out.failed.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
                continue
            out.compiled[target] += 1
            out.widened[target] += planned.stack > made.stack
            # Panels, and what is done between sweeps, work together over shared memory.
            if made.stack or (made.shared and job.tiled):
                out.spilled.append(f"{label}: {made.stack} B of stack, {made.shared} B shared")
    return out


def _jobs(pair: tuple[str, str], cases: Sequence[Case] | None, folder: Path) -> Iterator[Any]:
    """Yield the kernels of a pair."""
    import kernel_stats

    from optgen.driver import triton_text

    spec, plan = product.spec_of(pair[0]), product.plan_of(pair[1])
    named = None if cases is None else {case_name(spec, c) for c in cases}
    joined, kernels = triton_text.joined(spec, plan, "fast", partial(harness.module, folder))
    yield from kernel_stats.of_variants(".".join(pair), joined, kernels, named)


# The report -----------------------------------------------------------------------------------------------------------


def _worst_by(outcomes: Sequence[Outcome], key: Callable[[Cell], str], order: Sequence[str]) -> Iterator[list[str]]:
    for name in order:
        own = [o for o in outcomes if key(o.cell) == name]
        if own:
            good = sum(not o.failure for o in own)
            weight, states = max(o.weight for o in own), max(o.states for o in own)
            yield [name, f"{good} / {len(own)}", f"{weight:.3f}", f"{states:.3f}", f"{min(o.claimed for o in own):.0%}"]


@dataclass(frozen=True)
class Extent:
    """The extent of a run: the number of all cells or pairs, the seed of their order, and the commit."""

    whole: int
    seed: int
    pairs: int
    commit: str


def report_of_cells(outcomes: Sequence[Outcome], extent: Extent) -> str:
    """Return docs/test-full.md."""
    bad = [o for o in outcomes if o.failure]
    specs = [s for s in product.SPECS if any(o.cell.spec == s for o in outcomes)]
    plans = [p for p in product.PLANS if any(o.cell.plan == p for o in outcomes)]
    pairs = {(o.cell.spec, o.cell.plan) for o in outcomes}
    head = ["cells right", "worst error / bound, weight", "states", "least share bounded"]
    lines = [
        "# The whole product", "",
        "Written by `python tools/test_full.py`; see there for what is run.  A cell is a rule under a plan, with one",
        "parameter dtype, one setting of its flags and one size class.  It is right if the strict Triton kernels and",
        "the strict C++ kernels give the bits of the eager reference and every step stays within the bound that is",
        "derived for it from the rule and the formats; error / bound is at most 1 then, and near 1 where the bound is",
        "tight.  Where fp32 itself or a scale overflows, nothing is promised: the last column.  Rules with products",
        "of matrices have no such bound and are not here, nor are rules that are newer than the commit below.", "",
    ]  # fmt: skip
    if len(outcomes) < extent.whole:
        lines += [
            f"**This is a sample: {len(outcomes)} of {extent.whole} cells**, the first ones of the order drawn by seed",
            f"{extent.seed}: one of every pair of rule and plan, then a second of each, and so on.  {len(pairs)} of"
            f" {extent.pairs} pairs are in it.", "",
        ]  # fmt: skip
    lines += [
        f"**{len(outcomes) - len(bad)} of {len(outcomes)} cells are right**: {len(specs)} rules,"
        f" {len(plans)} plans, {', '.join(product.PARAMS)} parameters; {STEPS} steps on tensors of shapes"
        f" {', '.join(str(s) for s in product.SHAPES)}, where steps take several kernels also"
        f" {', '.join(str(s) for s in product.REDUCED)}.  The steps of {sum(o.stages for o in outcomes)} of them do:"
        " there the whole optimizer was run by every backend.",
        f"The C++ kernels of {sum(product.optimized(o.cell) for o in outcomes)} cells were compiled as users' are, the"
        " others without optimization.",
        f"That was commit {extent.commit}.", "",
        "## By plan", "", *table(["plan", *head], _worst_by(outcomes, lambda c: c.plan, plans)), "",
        "## By rule", "", *table(["rule", *head], _worst_by(outcomes, lambda c: c.spec, specs)),
    ]  # fmt: skip
    return "\n".join(lines + _failures([f"{o.cell}: {o.failure.splitlines()[0]}" for o in bad])) + "\n"


def report_of_kernels(kernels: Sequence[Kernels], extent: Extent, lost: Sequence[str] = ()) -> str:
    """Return docs/test-full-kernels.md; `lost` are turns whose process died."""
    failed = [*lost, *(f for k in kernels for f in k.failed)]
    spilled = [s for k in kernels for s in k.spilled]
    rows = []
    for t in TARGETS:
        named = [sum(f" for {t}:" in line for line in lines) for lines in (failed, spilled)]
        rows.append([t, sum(k.compiled[t] for k in kernels), *named, sum(k.widened[t] for k in kernels)])
    done = sum(sum(k.compiled.values()) for k in kernels)
    turns = Counter(k.turn.number for k in kernels)
    whole = turns[len(TURNS) - 1]
    lines = [
        "# The kernels of the whole product",
        "",
        "Written by `python tools/test_full.py`; see there for what is run.  The kernels in fast maths of every rule",
        "under every plan that fits it, for every parameter dtype, setting of flags and size class, are compiled down",
        f"to machine code by Triton {metadata.version('triton')}, without a GPU.",
        "",
    ]
    if whole < extent.whole:
        first = ", ".join(f"the first {n} of {turns[k]}" for k, n in enumerate(TURNS[:-1]))
        lines += [
            f"**This is a sample**: of the kernels of each of {extent.whole} pairs of rule and plan, in an order drawn",
            f"by seed {extent.seed}, {first}, and all of {whole}.",
            "",
        ]
    else:
        lines += [f"They are all kernels of all {extent.whole} pairs of rule and plan.", ""]
    lines += [
        f"**{done} of {done + len(failed)} compile**, of commit {extent.commit}.",
        "",
        *table(["target", "compiled", "failed", "use stack or share memory", "take more registers than planned"], rows),
        "",
        "Many plans leave a kernel as many registers as it is expected to fit in; where it spills, the first step",
        "compiles it with more (`compiled.without_spills`), and so was done here.  Of shared memory the kernels of",
        "tiles are asked; those that walk panels, or work between sweeps, share it by design.",
        *([""] + [f"- {s}" for s in spilled] if spilled else []),
    ]
    return "\n".join(lines + _failures(failed)) + "\n"


def _failures(failures: Sequence[str]) -> list[str]:
    return ["", "## What fails", "", *(f"- {line}" for line in failures)] if failures else []


# Results of earlier runs ----------------------------------------------------------------------------------------------


class Results:
    """The results of earlier runs of the same sources by item, and the file that new ones are added to, a line each."""

    def __init__(self, path: Path, state: str, fresh: bool = False) -> None:
        self.path, self.state = path, state
        self.known: dict[str, Any] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() and not fresh else ():
            with suppress(ValueError):  # the last line of a run that was killed
                item, of, result = json.loads(line)
                if of == state:
                    self.known[item] = result

    def add(self, item: str, result: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([item, self.state, result]))


def state_of_sources() -> str:
    """Return the digest of all sources of the product and of this test, and of the versions that they run with."""
    names = [*(f"tests/{n}.py" for n in ("product", "harness", "interpreter")), "tools/kernel_stats.py", __file__]
    files = [p for folder in ("optgen", "specs", "tests/ptx") for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc"]
    by = native.compiler()
    versions = [torch.__version__, metadata.version("triton"), metadata.version("numpy")]  # the interpreter's numbers
    digest = hashlib.sha256(repr([*versions, by and by.version, native.isa().name]).encode())
    for path in sorted(p for p in (*files, *(ROOT / n for n in names)) if p.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the commit that is checked out, short, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty= and changes", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


# Running --------------------------------------------------------------------------------------------------------------


@contextmanager
def interpreting(on: bool) -> Iterator[None]:
    """Let processes that are started inside interpret Triton, or compile: Triton decides it when it is imported."""
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ |= {"TRITON_INTERPRET": "1"} if on else {}
        yield


def drawn(cells: Iterable[Cell], seed: int) -> list[Cell]:
    """Return the cells in the order of the seed: one of every pair, then a second of each ..."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    before: Counter[tuple[str, str]] = Counter()
    turns = []
    for cell in order:
        turns.append(before[cell.spec, cell.plan])
        before[cell.spec, cell.plan] += 1
    return [order[k] for k in sorted(range(len(order)), key=turns.__getitem__)]


def spread(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, what: str, until: float
) -> Iterator[tuple[Item, Result | str]]:
    """Yield each item with its result as they come, from other processes; none is begun after `until` or SIGTERM.

    The result is a text if the process died.
    """
    context = multiprocessing.get_context("spawn")
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    rest = iter(items)
    with rich.progress.Progress(*columns) as bar:
        task = bar.add_task(what, total=len(items))
        more = True
        while more:
            running: dict[Future[Result], Item] = {}
            broken = False
            with ProcessPoolExecutor(jobs, context, max_tasks_per_child=TASKS) as pool:
                while not broken:
                    while len(running) < jobs and time.monotonic() < until and not STOPPED.is_set():
                        if (item := next(rest, None)) is None:
                            break
                        running[pool.submit(function, item)] = item
                    if not running:
                        more = False
                        break
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        item = running.pop(done)
                        broken = broken or isinstance(done.exception(), BrokenExecutor)
                        yield item, "a process died while it ran" if broken else done.result()
                        bar.advance(task)
                for item in running.values():  # a new pool goes on
                    yield item, "a process died while it ran"
                    bar.advance(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the product and return 1 if anything fails."""
    parser = argparse.ArgumentParser(description="The whole product of rules, plans, dtypes, flags and targets.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--only", choices=("cells", "kernels", "ptx"), help="default: all")
    parser.add_argument("--sample", type=int, help="only so many of each; nothing is written without --write")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cells and of kernels")
    parser.add_argument("--write", action="store_true", help="write the report of a --sample, too")
    parser.add_argument("--fresh", action="store_true", help="do not go on from what earlier runs found")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.set())
    until = time.monotonic() + 60 * chosen.minutes
    results = Results(KEPT, state_of_sources(), chosen.fresh)
    fails = False
    parts = (("cells", DOC, run_cells), ("kernels", KERNELS_DOC, run_kernels), ("ptx", PTX_DOC, run_emulated))
    for what, doc, part in parts:
        if chosen.only in (None, what):
            text, failed = part(results, chosen, until)
            if text and (chosen.sample is None or chosen.write):  # what never began leaves the last report
                doc.write_text(text, encoding="utf-8")
            print(text)
            fails = fails or failed
    return int(fails)


def run_cells(results: Results, chosen: argparse.Namespace, until: float) -> tuple[str, bool]:
    """Return the report on cells, and whether any is wrong."""
    every = [cell for cell in drawn(product.full_cells(), chosen.seed) if product.is_met(cell)]
    cells = every[: chosen.sample]
    found = {c: Outcome(c, **results.known[str(c)]) for c in cells if str(c) in results.known}
    with interpreting(True):
        for cell, made in spread(run_cell, [c for c in cells if c not in found], chosen.jobs, "cells", until):
            if isinstance(made, str):  # which cell's fault it was is not known: the next run tries it again
                found[cell] = Outcome(cell, failure=made)
            else:
                found[cell] = made
                results.add(str(cell), {name: value for name, value in asdict(made).items() if name != "cell"})
    outcomes = [found[cell] for cell in cells if cell in found]
    if not outcomes:
        return "", False
    extent = Extent(len(every), chosen.seed, len({(c.spec, c.plan) for c in every}), commit())
    return report_of_cells(outcomes, extent), any(o.failure for o in outcomes)


def pairs_with_kernels(seed: int) -> list[tuple[str, str]]:
    """Return every rule, those with matrix products too, with every plan that fits it, in the order of the seed."""
    found = sorted(product.pairs(product.WITH_MATRICES))
    random.Random(seed).shuffle(found)
    return found


def run_kernels(results: Results, chosen: argparse.Namespace, until: float) -> tuple[str, bool]:
    """Return the report on kernels, and whether any fails to compile, spills, or shares memory that it should not."""
    pairs = pairs_with_kernels(chosen.seed)
    turns = [Turn(pair, number, chosen.seed) for number in range(len(TURNS)) for pair in pairs][: chosen.sample]
    found = {t: Kernels(t, **results.known[str(t)]) for t in turns if str(t) in results.known}
    lost: list[str] = []
    with interpreting(False):
        for turn, made in spread(compile_turn, [t for t in turns if t not in found], chosen.jobs, "kernels", until):
            if isinstance(made, str):  # which kernel's fault it was is not known: the next run tries the turn again
                lost.append(f"{turn}: {made}")
            else:
                found[turn] = made
                results.add(str(turn), {name: value for name, value in asdict(made).items() if name != "turn"})
    kernels = [found[turn] for turn in turns if turn in found]
    if not kernels and not lost:
        return "", False
    text = report_of_kernels(kernels, Extent(len(pairs), chosen.seed, len(pairs), commit()), lost)
    return text, bool(lost) or any(k.failed or k.spilled for k in kernels)


def run_emulated(_: Results, chosen: argparse.Namespace, until: float) -> tuple[str, bool]:
    """Return the report on kernels that are executed without a device, and whether any is wrong."""
    jobs = emulate.drawn(chosen.seed)[: chosen.sample]
    results = emulate.Results(PTX_KEPT, state_of_sources(), commit(), chosen.fresh)
    emulate.run(results.rest(jobs), chosen.jobs, emulate.goes_on(until, STOPPED), results.add)
    found = {job: results.known[str(job)] for job in jobs if str(job) in results.known}
    text = emulate.report(found, jobs, chosen.seed) if found else ""
    return text, any(emulate.failures(job, x) for job, x in found.items())


if __name__ == "__main__":
    sys.exit(main())
