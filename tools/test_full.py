"""The whole product of rules, plans, parameter dtypes, flags and targets; the result is written to docs/test-full.md.

    python tools/test_full.py                     all of it; hours on a small machine
    python tools/test_full.py --sample 50         a sample, printed only
    python tools/test_full.py --no-targets        without cross-compiling

Every cell is compiled in memory and run in Triton's interpreter: strict kernel and eager reference must agree bit
for bit, and each step must keep the bound that is derived for it, around the fp64 oracle.  Every fast kernel is then
compiled for every target.  Exit code 1 where anything fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import rich.progress  # noqa: E402
import torch  # noqa: E402

from tests import product  # noqa: E402
from tests.product import Cell  # noqa: E402

DOC = ROOT / "docs" / "test-full.md"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
STEPS = 3

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


def run_cell(cell: Cell) -> Outcome:
    """Compiles and runs one cell; in a process that interprets Triton."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # numpy's, of the interpreter casting lanes that are not selected
    with tempfile.TemporaryDirectory() as folder:
        try:
            reports = product.check(cell, Path(folder), steps=STEPS)
        except Exception as error:  # any failure belongs into the report, with its cell
            return Outcome(cell, failure=f"{type(error).__name__}: {error}")
    worst: dict[str, float] = defaultdict(float)
    for report in reports:
        for name, w in report.worst.items():
            kind = "p" if name == "p" else "state"
            worst[kind] = max(worst[kind], w.ratio)
    broken = sorted({name for report in reports for name in report.broken})
    failure = f"outside the bound: {', '.join(broken)}" if broken else ""
    return Outcome(cell, worst["p"], worst["state"], min(report.claimed for report in reports), failure)


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
        for name, elements in module.TILE.items():
            for target in TARGETS:
                label = f"{name} under {pair[1]} for {target}"
                try:
                    machine = kernel_stats.TARGETS[target]
                    made = kernel_stats.compile_for(*_job(getattr(module, name), name, elements), machine)
                except Exception as error:  # any failure belongs into the report, with its kernel
                    out.failed.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                out.compiled[target] += 1
                if made.stack or made.shared:
                    out.spilled.append(f"{label}: {made.stack} B of stack, {made.shared} B shared")
    return out


def _job(kernel: Any, name: str, elements: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(kernel, types of its arguments, its constants) as the runtime launches it on aligned tensors."""
    import triton.language as tl

    dtypes = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
    grad = next(dtype for word, dtype in dtypes.items() if f"_{word}" in name)
    constants = dict(GRAD=grad, TILES=4, RAGGED=False, ALIGNED=True, TILE=elements)
    types = {argument: "fp32" for argument in kernel.arg_names if argument not in constants}
    return kernel, types | {"table": "*i64", "work": "*i32", "step_key": "i32"}, constants


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


def report(outcomes: Sequence[Outcome], kernels: Sequence[Kernels]) -> str:
    """docs/test-full.md."""
    bad = [o for o in outcomes if o.failure]
    head = ["cells right", "worst error / bound, weight", "states", "least share bounded"]
    lines = [
        "# The whole product",
        "",
        "Written by `python tools/test_full.py`; see there for what is run.  A cell is a rule under a plan, with one",
        "parameter dtype, one setting of its flags and one size class.  It is right if the strict Triton kernel and",
        "the strict C++ kernel give the bits of the eager reference and every step stays within the bound that is",
        "derived for it from the rule and the formats; error / bound is at most 1 then, and near 1 where the bound is",
        "tight.  Where fp32 itself or a scale overflows, nothing is promised: the last column.",
        "",
        f"**{len(outcomes) - len(bad)} of {len(outcomes)} cells are right**: {len(product.SPECS)} rules,"
        f" {len(product.PLANS)} plans, {', '.join(product.PARAMS)} parameters; {STEPS} steps on tensors of shapes"
        f" {', '.join(str(s) for s in product.SHAPES)}.",
        "",
        "## By plan",
        "",
        *table(["plan", *head], _worst_by(outcomes, lambda c: c.plan, product.PLANS)),
        "",
        "## By rule",
        "",
        *table(["rule", *head], _worst_by(outcomes, lambda c: c.spec, product.SPECS)),
    ]
    if kernels:
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


def spread(function: Callable[[Item], Result], items: Sequence[Item], jobs: int, what: str) -> list[Result]:
    """The results in order, by processes of their own."""
    context = multiprocessing.get_context("spawn")
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with ProcessPoolExecutor(jobs, context) as pool, rich.progress.Progress(*columns) as bar:
        futures = {pool.submit(function, item): k for k, item in enumerate(items)}
        results: dict[int, Result] = {}
        for done in bar.track(as_completed(futures), total=len(items), description=what):
            results[futures[done]] = done.result()
    return [results[k] for k in range(len(items))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the product; 1 where anything fails."""
    parser = argparse.ArgumentParser(description="The whole product of rules, plans, dtypes, flags and targets.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--sample", type=int, help="only so many cells and pairs; nothing is written")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--no-targets", action="store_true", help="do not cross-compile")
    chosen = parser.parse_args(arguments)
    cells, pairs = list(product.full_cells()), list(product.pairs())
    if chosen.sample is not None:
        cells = product.sample(cells, chosen.sample, chosen.seed)
        pairs = list(dict.fromkeys((c.spec, c.plan) for c in cells))
    with interpreting(True):
        outcomes = spread(run_cell, cells, chosen.jobs, "cells")
    kernels: list[Kernels] = []
    if not chosen.no_targets:
        with interpreting(False):
            kernels = spread(compile_pair, pairs, chosen.jobs, "kernels")
    text = report(outcomes, kernels)
    if chosen.sample is None:
        DOC.write_text(text, encoding="utf-8")
    print(text)
    return int(any(o.failure for o in outcomes) or any(k.failed or k.spilled for k in kernels))


if __name__ == "__main__":
    sys.exit(main())
