"""Time one C++ kernel by itself, as users get it and without its optimizations, side by side.

    python tools/cpu_kernel.py                                      AdamW int8_split24, in cache and far beyond
    python tools/cpu_kernel.py --optimizer Lion --plan int8_rn_split24 --numel 98304
    python tools/cpu_kernel.py --save lion.ii ...                   keep this kernel's text
    python tools/cpu_kernel.py --vs lion.ii ...                     race with one that another revision has kept

What tools/bench_cpu.py times is a whole step(); here the compiled function is called on one thread, with the tables
of a real step.  Variants take turns, in a random order every round: tiles of other sizes, no fetching ahead, and code
that the compiler does not interleave.  Least and median of the rounds, in ns per parameter; the least also in cycles
for 16 parameters, counted by a chain of additions, one a cycle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

import optgen.optim  # noqa: E402
from optgen.runtime.cpu import cpu, native  # noqa: E402
from optgen.runtime.layout import workspace  # noqa: E402

SIZES = (98304, 29999104)
CALL = 1e-4  # seconds at least that are timed at a time: few such windows are interrupted, however busy the machine is
CHAIN = """
#include <stdint.h>
extern "C" __attribute__((visibility("default"))) int64_t chain(int64_t n) {
    int64_t x = 0;
    for (int64_t i = 0; i < n; i += 4)
        asm volatile("add $1, %0\\n add $1, %0\\n add $1, %0\\n add $1, %0" : "+r"(x));
    return x;
}
"""


@dataclass(frozen=True)
class Call:
    """The arguments of a step's call.

    job      of the library
    rows     the table (int64), and `tensors`, the number of its rows
    scalars  fp32
    """

    job: native.Job
    rows: Any
    tensors: int
    scalars: Any

    def __call__(self, function: Callable[..., int], key: int) -> None:
        status = function(ctypes.addressof(self.rows), self.tensors, ctypes.addressof(self.scalars), key, 1)
        assert status == 0


@contextmanager
def recorded(optimizer: str, plan: str, numel: int, param: torch.dtype) -> Iterator[Call]:
    """A call on one parameter of that many elements, with a gradient of its dtype; the tensors live within."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter((torch.randn(numel, generator=generator) * 0.02).to(param))
    p.grad = (torch.randn(numel, generator=generator) * 1e-3).to(param)
    opt = getattr(optgen.optim, optimizer)([p], plan=plan, backend="cpp")
    calls: list[tuple[int, int, list[float]]] = []
    found = cpu._function

    def recording(library: ctypes.CDLL, bucket: Any) -> Any:
        step = found(library, bucket)
        if isinstance(step, native.Unavailable):
            raise SystemExit(f"cpu_kernel: {step}")
        if bucket.variant.temps or workspace.reduced(bucket.variant):
            raise SystemExit(f"cpu_kernel: {optimizer} takes several stages; this times kernels of one")
        jobs.append(cpu.job(bucket.plan, bucket.variant, bucket.grad_dtype))
        width = len(cpu.expected(bucket.variant, bucket.grad_dtype)[3:]) // 2 + 6

        def call(table: int, tensors: int, scalars: Any, key: int, threads: int) -> int:
            rows = (ctypes.c_int64 * (tensors * width)).from_address(table)
            tables.append((ctypes.c_int64 * len(rows))(*rows))
            calls.append((tensors, key, list(scalars)))
            return step(table, tensors, scalars, key, threads)

        return call

    jobs: list[native.Job] = []
    tables: list[Any] = []
    with patch.object(cpu, "_function", recording):
        opt.step()
    (job,), (rows,), ((tensors, _, scalars),) = jobs, tables, calls
    yield Call(job, rows, tensors, (ctypes.c_float * len(scalars))(*scalars))
    del opt


def function(job: native.Job, name: str = "optgen_step") -> Callable[..., int]:
    (library,) = native.load([job])
    if isinstance(library, native.Unavailable):
        raise SystemExit(f"cpu_kernel: {library}")
    found: Any = getattr(library, name)
    if name == "optgen_step":
        found.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    else:
        found.argtypes, found.restype = (ctypes.c_int64,), ctypes.c_int64
    return found


def preprocessed(job: native.Job) -> str:
    """Return the text of a job with all that it includes."""
    by = native.compiler()
    assert by is not None
    command = [*by.command, *job.flags(native.isa()), *by.flags, "-fopenmp"]
    return subprocess.run(
        [*command, "-E", "-x", "c++", "-"], input=job.source, capture_output=True, text=True, check=True
    ).stdout


def saved(text: str) -> Callable[..., int]:
    """Return the kernel of a text that `--save` wrote, for the instruction set that it was written for."""
    return function(native.Job("saved", text))


def variants(job: native.Job) -> dict[str, Callable[..., int]]:
    """Return the kernel as users get it, and the variants that it is compared with."""
    out = {"as it is": function(job)}
    for cache, tile in ((1 << 14, 1024), (1 << 20, 2048)):
        with patch.object(native, "first_level_cache", lambda cache=cache: cache), patch.object(native, "_known", {}):
            out[f"tiles of {tile}"] = function(job)
    by = native.compiler()
    if by is not None and by.flags:
        with patch.object(native, "compiler", lambda: replace(by, flags=())), patch.object(native, "_known", {}):
            out["not interleaved"] = function(job)
    return out


def gigahertz() -> float | None:
    """Return the clock of this core while it adds; None where it has no x86 instructions."""
    try:
        chain = function(native.Job("chain", CHAIN), "chain")
    except SystemExit:
        return None
    count, best = 2_000_000, float("inf")
    for _ in range(20):
        start = time.perf_counter()
        chain(count)
        best = min(best, time.perf_counter() - start)
    return count / best / 1e9


def race(
    call: Call,
    found: dict[str, Callable[..., int]],
    numel: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the ns per parameter of each round."""
    times: dict[str, list[float]] = {name: [] for name in found}
    key, inner = 1, 1
    for name in found:  # warm
        call(found[name], key)
    start = clock()
    call(found[next(iter(found))], key)
    inner = max(1, round(CALL / max(clock() - start, 1e-7)))
    for _ in range(rounds):
        for name in random.sample(list(found), len(found)):
            start = clock()
            for _ in range(inner):
                key = (key * 1103515245 + 12345) & 0x7FFFFFFF
                call(found[name], key)
            times[name].append((clock() - start) / inner / numel * 1e9)
    return times


def race_saved(chosen: argparse.Namespace) -> int:
    """Write the kernel's text, or print the ratio of its CPU time to that of the text that was written before."""
    for numel in chosen.numel:
        with recorded(chosen.optimizer, chosen.plan, numel, getattr(torch, chosen.param)) as call:
            if chosen.save:
                chosen.save.write_text(preprocessed(call.job), encoding="utf-8")
                return 0
            found = {"new": function(call.job), "old": saved(chosen.vs.read_text(encoding="utf-8"))}
            times = race(call, found, numel, chosen.rounds, time.thread_time)
            ratios = [new / old for new, old in zip(times["new"], times["old"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            name = f"{chosen.optimizer} {chosen.plan}, {chosen.param}, {native.isa().name}"
            print(f"{name}, {numel:,} elements: {middle:.3f} of the CPU time, quartiles {low:.3f} to {high:.3f}")
    return 0


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--optimizer", default="AdamW", help="of optgen.optim")
    parser.add_argument("--plan", default="int8_split24")
    parser.add_argument("--param", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--numel", nargs="*", type=int, default=list(SIZES), help="elements of the parameter")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the kernel's text, and time nothing")
    parser.add_argument("--vs", type=Path, metavar="FILE", help="race with this text alone, in CPU time")
    chosen = parser.parse_args(given)
    if chosen.save or chosen.vs:
        return race_saved(chosen)
    ghz = gigahertz()
    out: list[dict[str, Any]] = []
    for numel in chosen.numel:
        with recorded(chosen.optimizer, chosen.plan, numel, getattr(torch, chosen.param)) as call:
            for name, times in race(call, variants(call.job), numel, chosen.rounds).items():
                least, middle = min(times), statistics.median(times)
                cycles = None if ghz is None else round(least * 16 * ghz, 1)
                out.append({"numel": numel, "variant": name, "least": least, "median": middle, "cycles": cycles})
    if chosen.json:
        print(json.dumps(out, indent=2))
        return 0
    title = f"{chosen.optimizer} {chosen.plan}, {chosen.param}, {native.isa().name}, one thread"
    print(title + (f", {ghz:.2f} GHz" if ghz else ""))
    for row in out:
        cycles = "" if ghz is None else f"  {row['cycles']:6.1f} cycles for 16"
        print(f"{row['numel']:12,}  {row['variant']:<20} {row['least']:.3f} to {row['median']:.3f} ns{cycles}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
