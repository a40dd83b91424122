"""C++ kernels on CPU tensors: which one a bucket needs, its table, and the launch: one call for all its tensors.

The exported function of a kernel (optgen/runtime/cpu/cpp/optgen.h):

    int32_t optgen_step(
        const int64_t *table, int64_t tensors, const float *scalars, const int32_t *keys, int32_t threads)

table is a row of int64 per tensor, as `workspace.rows` makes them; in steps of several stages the address of a dense
copy, or 0, stands behind those of partial results.  Scalars and step keys stand line by line.  Elements are divided
evenly among the threads; their number does not change a bit of the result.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from optgen.runtime.cpu import join, native
from optgen.runtime.layout import workspace
from optgen.runtime.records import Variant, dtype_name
from optgen.runtime.records.join import Pair
from optgen.runtime.work import cpp_codecs, staged
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import HostScalars

SERIAL = 64 * 1024
"""Elements in all below which one thread does the work: starting a second takes as long as they do."""

MATRIX_CODECS = native.Job("matrices", '#include "matrices.h"\n')

Step = Callable[..., int]
"""(address of the table, tensors, addresses of the scalars and step keys, threads; in parts, the stages) -> 0."""


@functools.cache
def _text(file: Path) -> str:
    """Return the text of a rule or a plan."""
    return file.read_text(encoding="utf-8")


def has_kernels(plan: Pair) -> bool:
    """Return True if C++ kernels were generated."""
    return bool(plan.cpp) and all(x.is_file() for x in plan.cpp)


def source(plan: Pair, variant: Variant) -> str:
    """Return the text that holds the C++ kernel of a variant."""
    assert variant.rule is not None
    make = join.source if variant.single is not None else join.steps_source
    return make(variant, variant.rule, *map(_text, plan.cpp))


def job(plan: Pair, variant: Variant, grad: torch.dtype) -> native.Job:
    """Return the library that holds the kernel of a variant, for gradients of that dtype."""
    assert variant.rule is not None
    # Settings of flags that have one kernel have one library.
    kernel, dtype = next(s.kernel for s in variant.rule.stages if s.space == "elem"), dtype_name(grad)
    defines = f"OPTGEN_KERNEL={join.KERNEL}", f"OPTGEN_GRAD={dtype}"
    return native.Job(f"{kernel}_{variant.param}-{dtype}", source(plan, variant), defines)


def kernels(buckets: Sequence[Bucket]) -> list[Step | native.Unavailable]:
    """Return the function of each bucket's kernel, compiled if new; Unavailable in the place of one that failed.

    Buckets take codecs of matrix states, too."""
    jobs = [job(b.plan, b.variant, b.grad_dtype) for b in buckets]
    coded = [b for b in buckets if b.variant.eager.matrices]
    *libraries, codecs = native.load([*jobs, *([MATRIX_CODECS] if coded else jobs[:1])])
    for bucket in coded:
        if not isinstance(codecs, native.Unavailable):
            bucket.codecs = cpp_codecs.codecs(codecs, threads)
    return [
        made if isinstance(made, native.Unavailable) else _function(made, bucket)
        for made, bucket in zip(libraries, buckets, strict=True)
    ]


def _function(library: ctypes.CDLL, bucket: Bucket) -> Step:
    function = library.optgen_stages if bucket.in_parts else library.optgen_step
    function.restype = ctypes.c_int32
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    if bucket.in_parts:
        function.argtypes = (*function.argtypes, ctypes.c_int32, ctypes.c_int32)
    return function


@dataclass(frozen=True, slots=True)
class TensorTable:
    """A bucket's tensors as its kernel reads them; those without elements are left out.

    rows      int64, `width` a row: addresses of p, g and the fields, then six sizes (workspace.rows)
    elements  in all
    room      what the rows point to beside the bucket's own tensors
    """

    rows: array[int]
    width: int
    elements: int
    room: workspace.Workspace

    @property
    def address(self) -> int:
        return self.rows.buffer_info()[0]

    @property
    def tensors(self) -> int:
        return len(self.rows) // self.width


def table(lines: Sequence[Sequence[int]], staged: bool, room: workspace.Workspace) -> TensorTable:
    """Return the table of the rows of `workspace.rows`."""
    numel, whole = (-9, -1) if staged else (-6, -6)  # positions of the elements of the tensor, and of the logical one
    kept = [line for line in lines if line[whole]]
    rows = array("q", itertools.chain.from_iterable(kept))
    return TensorTable(rows, len(lines[0]), sum(line[numel] for line in kept), room)


NARROW = 64
"""Columns below which the matrices of a stack are walked as one long row: each of them is small, too."""


def dense_copies(variant: Variant, shape: torch.Size) -> int:
    """Return the number of fp32 tensors of the parameter's shape that the widest sweep fills, where it cannot sum as it
    goes; else 0.

    That is where blocks straddle the rows of matrices, and in stacks of matrices with very short rows.
    """
    columns = workspace.matrices(shape)[2]
    sweeps = [s for s in variant.stages if s.space == "elem" and s.matrices]
    straddling = any(columns % s.block for s in sweeps)
    if not sweeps or len(shape) < 3 or not (straddling or columns < NARROW):
        return 0
    from_elements = {t.name for t in variant.reduced}
    return max(1, *(len(from_elements.intersection(s.temps)) for s in sweeps))


def make_workspace(
    variant: Variant, shapes: Sequence[torch.Size], device: torch.device, pool: workspace.Pool | None
) -> workspace.Workspace:
    """Make the workspace of a bucket: temps, partial results, and dense copies where they are needed.

    Its last column holds the addresses of the dense copies, 0 where there is none.
    """
    few = workspace.make(variant, shapes, device, pool)
    copies = [dense_copies(variant, shape) * math.prod(shape) for shape in shapes]
    dense = torch.empty(sum(copies) + len(copies) * 16, dtype=torch.float32, device="cpu")
    at, addresses = -(-dense.data_ptr() // 64) * 64, []
    for count in copies:
        addresses.append(at if count else 0)
        at += -(-count * 4 // 64) * 64
    return replace(few, columns=[*few.columns, addresses], dense=dense)


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def threads(elements: int) -> int:
    """Return as many as torch uses; one for little work, and in a forked process: OpenMP's threads did not come along,
    and GNU's runtime would wait for them for ever."""
    return torch.get_num_threads() if elements >= SERIAL and not _forked else 1


def runner(bucket: Bucket, table: TensorTable, scalars: HostScalars) -> staged.Runner:
    """The step of a bucket that is more than one stretch of kernels (see staged.py)."""
    assert bucket.kernel is not None
    yield from staged.drive(bucket, table.room, scalars, functools.partial(call, bucket.kernel, table, scalars))
    torch.autograd.graph.increment_version(bucket.params)


def call(step: Step, table: TensorTable, scalars: HostScalars, *stretch: int) -> None:
    """Run a kernel over its table; stretch: of a step in parts, the stages to run, from one to before another."""
    given = scalars.values.buffer_info()[0], scalars.keys.buffer_info()[0]
    code = step(table.address, table.tensors, *given, threads(table.elements), *stretch)
    if code:
        raise RuntimeError(f"a C++ kernel refused its table (code {code})")
