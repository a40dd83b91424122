"""Time one C++ kernel by itself, as users get it and without its optimizations.

    python -m tools.bench kernel                                    AdamW int8_split24, in cache and far beyond
    python -m tools.bench kernel --optimizer Lion --plan int8_rn_split24 --numel 98304
    python -m tools.bench kernel --save lion.ii ...                 keep this kernel's text
    python -m tools.bench kernel --vs lion.ii ...                   race with one that another revision has kept

The compiled function is called on one thread, with the tables of a real step.  The variants are tiles of other sizes
and code that the compiler does not interleave.  Cycles are counted by a chain of additions, one a cycle.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import optgen.optim
from optgen.runtime.cpu import cpu, native
from tools.bench.race import Race, run_races

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
        given = ctypes.addressof(self.scalars), ctypes.byref(ctypes.c_int32(key))
        status = function(ctypes.addressof(self.rows), self.tensors, *given, 1)
        assert status == 0


@contextmanager
def recorded(optimizer: str, plan: str, numel: int, param: torch.dtype) -> Iterator[Call]:
    """A call on one parameter of that many elements, with a gradient of its dtype; the tensors live within."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter((torch.randn(numel, generator=generator) * 0.02).to(param))
    p.grad = (torch.randn(numel, generator=generator) * 1e-3).to(param)
    opt = getattr(optgen.optim, optimizer)([p], plan=plan, backend="cpp")
    calls: list[tuple[int, list[float]]] = []
    found = cpu._function

    def recording(library: ctypes.CDLL, bucket: Any) -> Any:
        step = found(library, bucket)
        if bucket.variant.temps or bucket.variant.reduced:
            raise SystemExit(f"kernel: {optimizer} takes several stages; this times kernels of one")
        jobs.append(cpu.job(bucket.plan, bucket.variant, bucket.grad_dtype))
        width, count = len(bucket.variant.fields) + 8, bucket.variant.host[1]

        def call(table: int, tensors: int, scalars: int, keys: int, threads: int) -> int:
            rows = (ctypes.c_int64 * (tensors * width)).from_address(table)
            tables.append((ctypes.c_int64 * len(rows))(*rows))
            calls.append((tensors, [*(ctypes.c_float * count).from_address(scalars)]))
            return step(table, tensors, scalars, keys, threads)

        return call

    jobs: list[native.Job] = []
    tables: list[Any] = []
    with patch.object(cpu, "_function", recording):
        opt.step()
    (job,), (rows,), ((tensors, scalars),) = jobs, tables, calls
    yield Call(job, rows, tensors, (ctypes.c_float * len(scalars))(*scalars))
    del opt


def function(job: native.Job, name: str = "optgen_step") -> Callable[..., int]:
    (library,) = native.load([job])
    if isinstance(library, native.Unavailable):
        raise SystemExit(f"kernel: {library}")
    found: Any = getattr(library, name)
    if name == "optgen_step":
        found.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
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


def races(asked: argparse.Namespace) -> Iterator[Race]:
    cycle = gigahertz()
    for numel in asked.numel:
        with recorded(asked.optimizer, asked.plan, numel, getattr(torch, asked.param)) as call:
            if asked.save:
                asked.save.write_text(preprocessed(call.job), encoding="utf-8")
                return
            found = variants(call.job)
            if asked.vs:
                old = native.Job("saved", asked.vs.read_text(encoding="utf-8"))
                found = {"old": function(old), "new": function(call.job)}
            key = 1

            def once(of: Callable[..., int], call: Call = call) -> None:
                nonlocal key
                key = (key * 1103515245 + 12345) & 0x7FFFFFFF
                call(of, key)

            title = f"{asked.optimizer} {asked.plan}, {asked.param}, {native.isa().name}, {numel:,} elements"
            runs = {name: (lambda of=of: once(of)) for name, of in found.items()}
            unit = ("ns per parameter", 1e9 / numel)
            if cycle and not asked.vs:
                unit = (f"cycles of {cycle:.2f} GHz for 16 parameters", 16e9 * cycle / numel)
            yield Race(title, runs, unit, least=CALL)


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="One C++ kernel by itself")
    parser.add_argument("--optimizer", default="AdamW", help="of optgen.optim")
    parser.add_argument("--plan", default="int8_split24")
    parser.add_argument("--param", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--numel", nargs="*", type=int, default=list(SIZES), help="elements of the parameter")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the kernel's text, and time nothing")
    parser.add_argument("--vs", type=Path, metavar="FILE", help="race with this text alone")
    return run_races(races, parser, given)
