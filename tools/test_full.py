"""The whole product of rules, plans, parameter dtypes, flags and targets; the result is written to docs/test-full.md.

    python tools/test_full.py                     all of it; many hours on a small machine
    python tools/test_full.py --minutes 45        what can be run in that time, of a drawn order (--seed)
    python tools/test_full.py --sample 50         the first 50 of that order, printed only; --write to keep the report
    python tools/test_full.py --no-targets        without cross-compiling

Every cell is compiled in memory.  The strict Triton kernels, in Triton's interpreter, the strict C++ kernels and the
eager reference must agree bit for bit: kernel beside kernel where a step is one, the whole optimizer where it takes
several.  Each step must keep the bound that is derived for it, around the fp64 oracle.  Every fast kernel is then
compiled for every target.  Exit code 1 where anything fails.

Cells come in a drawn order: one of every pair of rule and plan, then a second of each, and so on.  What was found is
kept in build/test_full.jsonl as it comes, under a digest of all sources: an interrupted run goes on where it was, and
a longer one begins with what a shorter one found.  --fresh runs all of it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import rich.progress  # noqa: E402
import torch  # noqa: E402

from tests import interpreter, product  # noqa: E402
from tests.product import Cell  # noqa: E402

DOC = ROOT / "docs" / "test-full.md"
KEPT = ROOT / "build" / "test_full.jsonl"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
STEPS = 3
TASKS = 64  # of a process, before another takes its place: nodes and loaded kernels are never given back

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
    """Compiles and runs one cell; in a process that interprets Triton."""
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


@dataclass
class Kernels:
    """The kernels of one pair: how many were compiled for each target, how many spill or share memory, what failed."""

    pair: tuple[str, str]
    compiled: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    spilled: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def compile_pair(pair: tuple[str, str]) -> Kernels:
    """Cross-compiles every kernel of a pair; in a process that compiles."""
    import kernel_stats

    from optgen.driver import emit

    torch.set_num_threads(1)
    out = Kernels(pair)
    text = emit.emit_plan(product.spec_of(pair[0]), product.plan_of(pair[1]))["triton_kernels.py"]
    with tempfile.TemporaryDirectory() as folder:
        module = _module(Path(folder) / "kernels.py", text)
        for job in kernel_stats.of_module(".".join(pair), module):
            for target in job.targets:
                label = f"{job.name} for {target}"
                try:
                    made = kernel_stats.compile_for(
                        job.fn, job.signature, job.constexprs, kernel_stats.TARGETS[target], job.num_warps,
                        aligned=job.aligned, **job.options,
                    )  # fmt: skip
                except Exception as error:  # any failure belongs into the report, with its kernel
                    out.failed.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                out.compiled[target] += 1
                # Panels, and what is done between sweeps, work together over shared memory.
                if made.stack or (made.shared and job.fn.__name__ in module.TILE):
                    out.spilled.append(f"{label}: {made.stack} B of stack, {made.shared} B shared")
    return out


def _module(path: Path, text: str) -> Any:
    path.write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# The report -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(str(x) for x in row)} |" for row in rows]


def _worst_by(outcomes: Sequence[Outcome], key: Callable[[Cell], str], order: Sequence[str]) -> Iterator[list[str]]:
    for name in order:
        own = [o for o in outcomes if key(o.cell) == name]
        if own:
            good = sum(not o.failure for o in own)
            weight, states = max(o.weight for o in own), max(o.states for o in own)
            yield [name, f"{good} / {len(own)}", f"{weight:.3f}", f"{states:.3f}", f"{min(o.claimed for o in own):.0%}"]


@dataclass(frozen=True)
class Extent:
    """How much of the product was run: all cells there are, and the seed of their order."""

    cells: int
    seed: int
    targets: bool


def report(outcomes: Sequence[Outcome], kernels: Sequence[Kernels], extent: Extent) -> str:
    """docs/test-full.md."""
    bad = [o for o in outcomes if o.failure]
    specs = [s for s in product.SPECS if any(o.cell.spec == s for o in outcomes)]
    plans = [p for p in product.PLANS if any(o.cell.plan == p for o in outcomes)]
    pairs = {(o.cell.spec, o.cell.plan) for o in outcomes}
    head = ["cells right", "worst error / bound, weight", "states", "least share bounded"]
    lines = [
        "# The whole product",
        "",
        "Written by `python tools/test_full.py`; see there for what is run.  A cell is a rule under a plan, with one",
        "parameter dtype, one setting of its flags and one size class.  It is right if the strict Triton kernels and",
        "the strict C++ kernels give the bits of the eager reference and every step stays within the bound that is",
        "derived for it from the rule and the formats; error / bound is at most 1 then, and near 1 where the bound is",
        "tight.  Where fp32 itself or a scale overflows, nothing is promised: the last column.",
        "",
    ]
    if len(outcomes) < extent.cells:
        lines += [
            f"**This is a sample: {len(outcomes)} of {extent.cells} cells**, the first ones of the order drawn by seed",
            f"{extent.seed}: one of every pair of rule and plan, then a second of each, and so on.  {len(pairs)} of"
            f" {len(list(product.pairs()))} pairs",
            "are in it.",
            "",
        ]
    lines += [
        f"**{len(outcomes) - len(bad)} of {len(outcomes)} cells are right**: {len(specs)} rules,"
        f" {len(plans)} plans, {', '.join(product.PARAMS)} parameters; {STEPS} steps on tensors of shapes"
        f" {', '.join(str(s) for s in product.SHAPES)}, where steps take several kernels also"
        f" {', '.join(str(s) for s in product.REDUCED)}.  The steps of {sum(o.stages for o in outcomes)} of them do:"
        " there the whole optimizer was run by every backend.",
        "",
        "## By plan",
        "",
        *table(["plan", *head], _worst_by(outcomes, lambda c: c.plan, plans)),
        "",
        "## By rule",
        "",
        *table(["rule", *head], _worst_by(outcomes, lambda c: c.spec, specs)),
    ]
    if extent.targets:
        lines += ["", "## Kernels", ""]
        rows = [
            [t, sum(k.compiled[t] for k in kernels), sum(f" for {t}:" in f for k in kernels for f in k.failed)]
            for t in TARGETS
        ]
        lines += table(["target", "kernels compiled", "failed"], rows)
        spilled = [s for k in kernels for s in k.spilled]
        lines += ["", f"{len(spilled)} of them use stack or shared memory.", *(f"- {s}" for s in spilled)]
    failures = [f"{o.cell}: {o.failure.splitlines()[0]}" for o in bad] + [f for k in kernels for f in k.failed]
    if failures:
        lines += ["", "## What fails", "", *(f"- {line}" for line in failures)]
    return "\n".join(lines) + "\n"


# Running --------------------------------------------------------------------------------------------------------------


@contextmanager
def interpreting(on: bool) -> Iterator[None]:
    """Triton decides when a kernel is decorated: the processes started here interpret, or compile."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    if on:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def drawn(cells: Iterable[Cell], seed: int) -> list[Cell]:
    """The cells in the order of the seed: one of every pair, then a second of each ..."""
    order = list(cells)
    random.Random(seed).shuffle(order)
    before: Counter[tuple[str, str]] = Counter()
    turns = []
    for cell in order:
        turns.append(before[cell.spec, cell.plan])
        before[cell.spec, cell.plan] += 1
    return [order[k] for k in sorted(range(len(order)), key=turns.__getitem__)]


def digest() -> str:
    """Content hash of everything that a result depends on."""
    out = hashlib.sha256()
    files = [p for folder in ("optgen", "specs") for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc"]
    files += [ROOT / "tests" / "product.py", ROOT / "tests" / "harness.py"]
    files += [Path(__file__), ROOT / "tools" / "kernel_stats.py"]
    for file in sorted(p for p in files if p.is_file()):
        out.update(f"{file.relative_to(ROOT).as_posix()}\0".encode() + file.read_bytes())
    return f"{out.hexdigest()[:16]}-{torch.__version__}-{metadata.version('triton')}"


class Kept:
    """What earlier runs of the same sources found, and a file that takes what this one finds."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path, self.digest = path, digest()
        self.found: dict[str, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and not fresh else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if row["digest"] == self.digest:
                self.found[row["item"]] = row["result"]

    def add(self, item: str, result: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * (self._cut(file) > 0))
            file.write(json.dumps({"digest": self.digest, "item": item, "result": result}) + "\n")

    def _cut(self, file: Any) -> int:
        """Whether a killed run left half a line at the end."""
        if file.tell() == 0:
            return 0
        with self.path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            return int(before.read(1) != b"\n")


def spread(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, what: str, until: float
) -> Iterator[tuple[Item, Result | str]]:
    """Each item with its result, as they come, by processes of their own; none is begun after `until`.

    The result is a text where the process died.
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
                    while len(running) < jobs and time.monotonic() < until and (item := next(rest, None)) is not None:
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
    """Runs the product; 1 where anything fails."""
    parser = argparse.ArgumentParser(description="The whole product of rules, plans, dtypes, flags and targets.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--sample", type=int, help="only so many cells; nothing is written without --write")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cells")
    parser.add_argument("--no-targets", action="store_true", help="do not cross-compile")
    parser.add_argument("--write", action="store_true", help="write the report of a --sample, too")
    parser.add_argument("--fresh", action="store_true", help="do not go on from what earlier runs found")
    chosen = parser.parse_args(arguments)
    until = time.monotonic() + 60 * chosen.minutes
    every = [cell for cell in drawn(product.full_cells(), chosen.seed) if product.is_met(cell)]
    cells = every[: chosen.sample]
    kept = Kept(KEPT, chosen.fresh)
    found: dict[Cell, Outcome] = {}
    for cell in cells:
        if (row := kept.found.get(str(cell))) is not None:
            found[cell] = Outcome(cell, **row)
    with interpreting(True):
        left = [c for c in cells if c not in found]
        for cell, result in spread(run_cell, left, chosen.jobs, "cells", until):
            found[cell] = Outcome(cell, failure=result) if isinstance(result, str) else result
            if isinstance(result, str):  # which cell's fault it was is not known: the next run tries it again
                continue
            row = asdict(found[cell])
            del row["cell"]
            kept.add(str(cell), row)
    outcomes = [found[cell] for cell in cells if cell in found]
    kernels: dict[tuple[str, str], Kernels] = {}
    if not chosen.no_targets:
        pairs = list(dict.fromkeys((o.cell.spec, o.cell.plan) for o in outcomes))
        for pair in pairs:
            if (row := kept.found.get(f"kernels {pair}")) is not None:
                kernels[pair] = Kernels(pair, **row)
        with interpreting(False):
            left_pairs = [p for p in pairs if p not in kernels]
            for pair, made in spread(compile_pair, left_pairs, chosen.jobs, "kernels", until):
                kernels[pair] = Kernels(pair, failed=[f"{pair}: {made}"]) if isinstance(made, str) else made
                if isinstance(made, str):
                    continue
                row = asdict(kernels[pair])
                del row["pair"]
                kept.add(f"kernels {pair}", row)
    extent = Extent(len(every), chosen.seed, not chosen.no_targets)
    text = report(outcomes, list(kernels.values()), extent)
    if chosen.sample is None or chosen.write:
        DOC.write_text(text, encoding="utf-8")
    print(text)
    return int(any(o.failure for o in outcomes) or any(k.failed or k.spilled for k in kernels.values()))


if __name__ == "__main__":
    sys.exit(main())
