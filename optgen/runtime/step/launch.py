"""The kernels of buckets, and the tables of addresses that they read.

A C++ function gets one table.  A Triton kernel gets two on the device: a row of addresses and sizes per tensor (int64),
and a list of work items (tensor row, first tile) (int32).  They are kept between steps and sent again only when an
address or a size changes.  Tensors whose addresses are not multiples of 16 bytes, and those whose rows end within a
block, have launches of their own, so that the common kernel may use wide accesses without masks.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.cpu import cpu
from optgen.runtime.gpu import compiled, stages
from optgen.runtime.layout import layout, workspace
from optgen.runtime.records import dtype_name
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import tell, warn
from optgen.runtime.states import state
from optgen.runtime.work import counting, eager, staged
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Control, HostScalars

ALIGNMENT = 16
"""Bytes: the widest access of a thread."""

Scalars = HostScalars | Control
"""The scalars of a bucket's step: on the host, or on the device that computes them."""

TILES = stages.TILES


def _limits(kernels: ModuleType, device: torch.device, function: str) -> dict[str, int]:
    """`limits` on that device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    return limits(kernels, function, torch.cuda.get_device_capability(device)[0])


@functools.cache
def _warn_fused(device: torch.device) -> None:
    """Warn where the assembler fuses products and sums of pairs of fp32 that are marked not to be: CUDA 12.9's, which
    Triton 3.6 brings for compute capability 10 and later (13.4's, of Triton 3.9, does not)."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] < 10:
        return
    from triton import knobs

    if (version := str(knobs.nvidia.ptxas_blackwell.version)).startswith("12."):
        warn(f"strict kernels differ in last bits here: ptxas {version} fuses what it must not; update Triton to 3.9")


def limits(kernels: ModuleType, function: str, major: int) -> dict[str, int]:
    """Return the options of NVIDIA's compiler for a kernel, for devices of that major compute capability.

    Plans count for 8 and 9.  From 10 on a kernel of more than 64 registers may take 8 more: CAME under int8_split24
    spills there at 128.  64 stay: with them a processor holds all 32 programs that it can, with 72 only 28, and nearly
    every kernel that is planned with 64 fits in them; the first step finds out which do not.  A program of many warps
    is left no more than a processor has for it: told more, it could not start.
    """
    found: dict[str, int] = getattr(kernels, "OPTIONS", {}).get(function, {})
    most = compiled.registers(getattr(kernels, "WARPS", {}).get(function, 1))
    return {name: min(value + (8 if major >= 10 and value > 64 else 0), most) for name, value in found.items()}


class Signature(NamedTuple):
    """The shapes, streams, addresses (p, g, the fields) and places of a bucket's tensors: while it is equal, the tables
    hold.  Streams are keys of random bits, with the number of the tensor's line of scalars above."""

    shapes: list[torch.Size]
    streams: list[int]
    columns: list[list[int]]
    places: workspace.Places

    @classmethod
    def of(cls, bucket: Bucket) -> Signature:
        params, states = bucket.params, bucket.states
        columns = [[p.data_ptr() for p in params], [g.data_ptr() for g in bucket.grads]]
        columns += [[s[name].data_ptr() for s in states] for name in bucket.variant.names]
        shown, count = [x.data_ptr() for x in bucket.shown()], len(params)
        columns += [shown[k : k + count] for k in range(0, len(shown), count)]
        shapes = [p.shape for p in params]
        matrix = bucket.variant.matrix
        if matrix != "last":
            shapes = [layout.matrix_shape(matrix, shape) for shape in shapes]
        streams = [line << 32 | key & 0xFFFFFFFF for line, key in zip(bucket.line_of, bucket.streams, strict=True)]
        return cls(shapes, streams, columns, bucket.places)

    def with_gradients(self, addresses: list[int]) -> Signature:
        """Return the signature for gradients that lie elsewhere."""
        return self._replace(columns=[self.columns[0], addresses, *self.columns[2:]])


class Kernels(ABC):
    """The kernels of a bucket's step and the tables that they read.  It holds none of the bucket's own tensors.

    signature   for which the tables hold
    stream      the stream of a GPU on which they were made
    control     the scalars of a step that is counted on the device, else None
    own_memory  True if it has memory for what stages leave for one another that no pool has
    """

    ALIGNMENT: ClassVar[int] = ALIGNMENT
    """Bytes modulo which addresses decide how kernels are launched."""

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        self.signature, self.stream = now, stream
        self.device = bucket.device
        self.control: Control | None = old.control if old else None
        self.own_memory = bucket.pool is None and bool(bucket.variant.temps)

    def run(self, bucket: Bucket, scalars: Scalars) -> None:
        """Make the step of a bucket that needs nothing of the host."""
        staged.run(self.runner(bucket, scalars))

    @abstractmethod
    def runner(self, bucket: Bucket, scalars: Scalars) -> staged.Runner:
        """Return the step in parts, between which the host has something to do (see staged.py)."""

    @abstractmethod
    def follow(self, gradients: list[int]) -> None:
        """Take over other addresses of gradients, equal to the ones before modulo ALIGNMENT."""

    def load(self, scalars: Scalars) -> None:
        """Compile what `run` starts: what a compiler or a device refuses is refused before anything changes."""
        return

    def send(self, scalars: Scalars) -> None:
        """Bring scalars to where kernels read them, if that is on a device."""
        return


class EagerKernels(Kernels):
    """The strict tiles, run as torch, always in parts; there is no table, and no plan is kept."""

    def __init__(self) -> None:
        self.control = None

    def runner(self, bucket: Bucket, scalars: Scalars) -> staged.Runner:
        assert not isinstance(scalars, Control)
        return eager.runner(bucket, scalars)

    def follow(self, gradients: list[int]) -> None:
        """Do nothing: the tiles read the gradients themselves."""


class CppKernels(Kernels):
    """One C++ function over one table."""

    ALIGNMENT = 1

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        self.kernel = bucket.kernel
        staged, (shapes, streams, columns, places) = bool(bucket.variant.stages), now
        if old is not None and old.signature.shapes == shapes:
            room = old.table.room  # nothing in it outlives a step
        else:
            make, pool = (cpu.make_workspace, bucket.pool) if staged else (workspace.make, None)
            room = make(bucket.variant, shapes, bucket.device, pool)
        self.own_memory |= staged and any(room.columns[-1])  # dense copies
        self.table = cpu.table(workspace.rows(columns, room, shapes, streams, places, staged), staged, room)

    def run(self, bucket: Bucket, scalars: Scalars) -> None:
        assert self.kernel is not None and not isinstance(scalars, Control)
        cpu.call(self.kernel, self.table, scalars)

    def runner(self, bucket: Bucket, scalars: Scalars) -> staged.Runner:
        assert not isinstance(scalars, Control)
        return cpu.runner(bucket, self.table, scalars)

    def follow(self, gradients: list[int]) -> None:
        live = [g for g, shape in zip(gradients, self.signature.shapes, strict=True) if 0 not in shape]
        self.table.rows[1 :: self.table.width] = array("q", live)
        self.signature = self.signature.with_gradients(gradients)


class TritonKernels(Kernels):
    """Triton kernels, and their table on the device.

    spare  pinned memory from which a CUDA graph may fill a table; made before there is a graph
    """

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        import triton.language as tl

        self.plan, self.module = bucket.plan, compiled.kernels(bucket.plan)
        if (rule := bucket.variant.rule) and rule.strict:
            _warn_fused(self.device)
        told = functools.partial(_limits, self.module, self.device)
        before, grad = old.launches if old else None, getattr(tl, dtype_name(bucket.grad_dtype))
        self.launches: stages.Launches = stages.build(bucket, self.module, grad, now, before, told)
        self.spare: Tensor | None = None
        self.own_memory |= bool(self.launches.kept)

    def load(self, scalars: Scalars) -> None:
        _tell_compiling(self.plan)
        with guard(self.device):
            for call in stages.stretch(self.launches):
                compiled.load(call, self.control or scalars)

    def _start(self, scalars: Scalars, begin: int = 0, end: int | None = None) -> None:
        with guard(self.device):
            for call in stages.stretch(self.launches, begin, end):
                compiled.start(call, self.control or scalars)

    def run(self, bucket: Bucket, scalars: Scalars) -> None:
        self.send(scalars)
        self._start(scalars)

    def send(self, scalars: Scalars) -> None:
        # For a graph the host does so before each replay.
        if self.control is not None and not isinstance(scalars, Control) and not counting.capturing():
            with guard(self.device):
                self.control.send(scalars)

    def runner(self, bucket: Bucket, scalars: Scalars) -> staged.Runner:
        self.send(scalars)
        start = functools.partial(self._start, scalars)
        yield from staged.drive(bucket, self.launches.room, scalars, start)
        torch.autograd.graph.increment_version(bucket.params)

    def _point(self, gradients: list[int]) -> Tensor:
        """Return the table on the host, with these gradients written into it."""
        host, live = self.launches.host, self.launches.live.numbers
        if live:
            host[:, 1] = torch.tensor([gradients[i] for i in live], dtype=torch.int64, device="cpu")
        return host

    def follow(self, gradients: list[int]) -> None:
        with guard(self.device):
            self.launches = stages.moved(self.launches, workspace.sent(self._point(gradients), self.device))
        self.signature = self.signature.with_gradients(gradients)
        self.stock()

    def settle(self, bucket: Bucket) -> None:
        """Make the memory of scalars on the device, where there are several lines or it counts steps."""
        lines = len(bucket.lines)
        if not (bucket.counted or bucket.sent) and lines == 1:
            self.control = None
        elif self.control is None or self.control.lines != lines:
            self.control = Control(bucket.variant.host[1], bucket.device, lines)
        self.stock()

    def stock(self) -> None:
        """Make the spare memory, if the step is counted on the device."""
        if self.control is not None and self.spare is None:
            self.spare = torch.empty_like(self.launches.host, pin_memory=self.device.type == "cuda")

    def tensors(self) -> list[object]:
        """Return what kernels read or write beside the optimizer's own tensors."""
        made = self.launches
        return [made.room, *made.kept, *(x for call in made.calls for x in (call.table, call.work))]

    def for_graph(self, bucket: Bucket, now: Signature) -> tuple[TritonKernels, Tensor | None]:
        """Return kernels for a CUDA graph: these where nothing has moved, else a copy for gradients that lie elsewhere,
        and the memory on the host from which the graph fills its table, at each run."""
        if now == self.signature:
            return copy.copy(self), None
        gradients, spare = now.columns[1], self.spare
        pairs = zip(gradients, self.signature.columns[1], strict=False)
        moved = self.signature.with_gradients(gradients) != now or any((a ^ b) % ALIGNMENT for a, b in pairs)
        if moved or spare is None:
            raise counting.not_ready(f"{state.label(*bucket.first)}, whose gradient lies elsewhere,")
        made, self.spare = copy.copy(self), None
        made.signature, made.spare = now, None
        spare.copy_(self._point(gradients))
        table = torch.empty_like(spare, device=self.device).copy_(spare, non_blocking=True)
        made.launches = stages.moved(self.launches, table)
        return made, spare


@functools.cache
def _tell_compiling(plan: Pair) -> None:
    tell(f"loading the Triton kernels of plan {plan.name}; those new to this machine are compiled, which takes seconds")


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels start on the current device: make that the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Tables = dict[tuple[object, ...], Kernels]
"""The kernels of a step's buckets."""


class Launcher:
    """Makes the kernels of an optimizer's buckets, from those of the step before where they are alike.

    used      those of the last step
    captured  what CUDA graphs hold
    """

    def __init__(self) -> None:
        self._kept, self.used = Tables(), Tables()
        self.captured: list[object] = []
        self._capturing = False
        self._pools: dict[int, workspace.Pool] = {}
        self._turns: Counter[int] = Counter()

    def begin(self, others: Iterable[Tables]) -> None:
        """Begin a step: what the step before did not use is dropped; where a CUDA graph takes the step up, it may have
        been used by others, too."""
        self._capturing = counting.capturing()
        if self._capturing:
            self.used = {key: made for one in (*others, self.used) for key, made in one.items()}
        else:
            self._kept, self.used = self.used, {}
        self._turns.clear()
        for pool in self._pools.values():
            pool.grown = False

    def prepare(self, bucket: Bucket) -> Kernels:
        """Return the bucket's kernels; checks the states whenever an address or size is new."""
        if bucket.backend == "reference":
            bucket.check()
            return EagerKernels()
        try:
            now = Signature.of(bucket)
        except (KeyError, AttributeError):
            bucket.check()  # says what is missing
            raise
        self._turns[bucket.turn] += bucket.waits
        place = self._turns[bucket.turn] * bucket.waits  # the buckets of one turn run together, each beside the others
        if not bucket.variant.model_temps and not self._capturing:
            bucket.pool = self._pools.setdefault(place, workspace.Pool())
        key = (*bucket.kind, bucket.backend, place)
        with guard(bucket.device):
            if self._capturing:
                return self._for_graph(bucket, now, self.used.get(key))
            stream = torch.cuda.current_stream().cuda_stream if bucket.device.type == "cuda" else 0
            old = self._kept.get(key)
            if old is not None and old.stream != stream:
                old = None
            if old is None or old.signature != now:
                bucket.check()
                kind: type[Kernels] = CppKernels if bucket.backend == "cpp" else TritonKernels
                old = kind(bucket, now, stream, old)
            if isinstance(old, TritonKernels):
                old.settle(bucket)
            self.used[key] = old
        return old

    @property
    def grown(self) -> bool:
        """True if this step's kernels have memory beside that of other plans: of their own, or more from a pool."""
        return any(x.own_memory for x in self.used.values()) or any(pool.grown for pool in self._pools.values())

    def _for_graph(self, bucket: Bucket, now: Signature, last: Kernels | None) -> Kernels:
        """Return kernels for a graph, and keep them for as long as the optimizer is there."""
        bucket.check()
        if not isinstance(last, TritonKernels) or last.control is None:
            raise counting.not_ready(state.label(*bucket.first))
        made, room = last.for_graph(bucket, now)
        self.captured.append((made, made.tensors(), last.control.tensors(), room))
        return made
