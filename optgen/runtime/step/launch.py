"""The kernels of buckets, and the tables of addresses that they read.

A C++ function gets one table.  A Triton kernel gets two on the device: a row of addresses and sizes per tensor (int64),
and a list of work items (tensor row, first tile) (int32).  They are kept between steps and sent again only when an
address or a size changes.  Tensors whose addresses are not multiples of 16 bytes, and those whose rows end within a
block, go to kernels of their own, so that the common kernel may use wide accesses without masks.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.cpu import cpu, cpu_stages
from optgen.runtime.gpu import compiled, stages
from optgen.runtime.layout import layout, workspace
from optgen.runtime.layout.workspace import Workspace, matrices
from optgen.runtime.records import dtype_name
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import tell, warn
from optgen.runtime.states import state
from optgen.runtime.work import counting, staged
from optgen.runtime.work.bucket import Bucket
from optgen.runtime.work.counting import Scalars

TILES = 4
"""Full tiles per work item, where a plan does not say otherwise: amortizes the table look-ups."""

ALIGNMENT = 16
"""Bytes: the widest access of a thread."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of launches; None: as the plan says.  No setting but `rows` changes a bit of the result.

    tile   elements per tile, a power of two and of at least one storage block
    tiles  full tiles per work item; they go in pairs, one that is left over by masked parts
    warps  warps per program
    rows   rows per tile of a panel: 1, 2, 4 or 8; in fast maths another order of sums
    """

    tile: int | None = None
    tiles: int | None = None
    warps: int = 1
    rows: int = 1

    def sizes(self, kernels: ModuleType, function: str) -> tuple[int, int]:
        """(elements per tile, full tiles per work item) of a kernel."""
        # AMD's warps have 64 threads: as many elements for each.
        own = kernels.TILE[function] * (1 if torch.version.hip is None else 2)
        return self.tile or own, self.tiles or TILES


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


tuning = Tuning()


@contextmanager
def tuned(setting: Tuning) -> Iterator[None]:
    """Steps made inside launch kernels that way, in every optimizer of the process: for measuring defaults."""
    global tuning
    before, tuning = tuning, setting
    try:
        yield
    finally:
        tuning = before


Places = Sequence[layout.Place] | None
"""The place of each tensor; None: each is all of its logical tensor."""

SIZES = 6
"""Entries of a table row behind its addresses."""


def rows(
    columns: Sequence[Sequence[int]], shapes: Sequence[torch.Size], streams: Sequence[int], places: Places = None
) -> list[list[int]]:
    """The table, a row per tensor: its addresses (p, g, the fields; tables), numel, columns, stream key; then
    where it lies in the logical tensor: row and column of its first element, columns of that (layout.Place)."""
    return [
        [*addresses, math.prod(shape), layout.grid(shape)[1], stream, *place[:3]]
        for *addresses, shape, stream, place in zip(
            *columns, shapes, streams, places or map(layout.place, shapes), strict=True
        )
    ]


def stage_rows(
    columns: Sequence[Sequence[int]],
    room: Workspace,
    shapes: Sequence[torch.Size],
    streams: Sequence[int],
    places: Places = None,
) -> list[list[int]]:
    """The table of a step of several stages: addresses (p, g, the fields, the temps, the partials, tables of numbers;
    where that matters, of what columns are made of), then the number of matrices, their rows and columns, then as in
    `rows`; then rows and columns of the matrices of the logical tensor, and its numel."""
    sizes = [list(column) for column in zip(*(matrices(shape) for shape in shapes), strict=True)]
    axes = [room.axes] if room.axes else []
    of_tables = _of_numbers(room.numbers, len(shapes))
    lines = rows([*columns, *room.columns, *of_tables, *axes, *sizes], shapes, streams, places)
    return [[*line, *place[3:]] for line, place in zip(lines, places or map(layout.place, shapes), strict=True)]


def _of_numbers(numbers: Sequence[Tensor], tensors: int) -> list[list[int]]:
    """Columns of the addresses of tables of numbers, the same for all tensors."""
    return [[table.data_ptr()] * tensors for table in numbers]


class Signature(NamedTuple):
    """The shapes, stream keys, addresses (p, g, the fields) and places of a bucket's tensors, and the dimensions that
    their columns are made of: while it is equal, the tables hold."""

    shapes: list[torch.Size]
    streams: list[int]
    columns: list[list[int]]
    places: Places
    dims: workspace.Dims

    @classmethod
    def of(cls, bucket: Bucket) -> Signature:
        params, states = bucket.params, bucket.states
        columns = [[p.data_ptr() for p in params], [g.data_ptr() for g in bucket.grads]]
        columns += [[s[name].data_ptr() for s in states] for name in bucket.variant.names]
        shapes = [p.shape for p in params]
        matrix, dims = bucket.variant.matrix, None
        if bucket.variant.has_axes:
            dims = [layout.column_dims(matrix, shape) for shape in shapes]
        if matrix != "last":
            shapes = [layout.matrix_shape(matrix, shape) for shape in shapes]
        return cls(shapes, bucket.streams, columns, bucket.places, dims)

    def with_gradients(self, addresses: list[int]) -> Signature:
        """Return the signature for gradients that lie elsewhere."""
        return self._replace(columns=[self.columns[0], addresses, *self.columns[2:]])


class Kernels(ABC):
    """The kernels of a bucket's step and the tables that they read.  It holds none of the bucket's own tensors.

    known    the signature for which the tables hold
    stream   the stream of a GPU on which they were made
    control  the scalars of a step that is counted on the device, else None
    """

    ALIGNMENT: ClassVar[int] = ALIGNMENT
    """Bytes modulo which addresses decide how kernels are launched."""

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        self.known, self.stream = now, stream
        self.device, self.variant = bucket.device, bucket.variant
        self.control: counting.Control | None = old.control if old else None

    @abstractmethod
    def run(self, scalars: Scalars, step_key: int) -> None:
        """Start the kernels of a step that is one stretch of them."""

    @abstractmethod
    def runner(self, bucket: Bucket, scalars: Scalars, step_key: int) -> staged.Runner:
        """Return the step in parts, between which the host has something to do (see staged.py)."""

    @abstractmethod
    def follow(self, gradients: list[int]) -> None:
        """Take over other addresses of gradients, equal to the ones before modulo ALIGNMENT."""

    def load(self, scalars: Scalars, step_key: int) -> None:
        """Compile what `run` starts: what a compiler or a device refuses is refused before anything changes."""
        return


class Native(Kernels):
    """One C++ function over one table."""

    ALIGNMENT = 1

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        self.kernel = bucket.kernel
        if bucket.variant.stages:
            alike = old is not None and (old.known.shapes, old.known.dims) == (now.shapes, now.dims)
            before = old.table if old is not None and alike else None
            self.table = cpu_stages.table(bucket.variant, *now, before, bucket.pool)
        else:
            lines = rows(now.columns, now.shapes, now.streams, now.places)
            self.table = cpu.table(lines, len(bucket.variant.names))

    def run(self, scalars: Scalars, step_key: int) -> None:
        assert self.kernel is not None
        cpu.call(self.kernel, self.table, scalars, step_key)

    def runner(self, bucket: Bucket, scalars: Scalars, step_key: int) -> staged.Runner:
        return cpu.runner(bucket, self.table, scalars, step_key)

    def follow(self, gradients: list[int]) -> None:
        live = [g for g, shape in zip(gradients, self.known.shapes, strict=True) if 0 not in shape]
        self.table.rows[1 :: self.table.width] = array("q", live)
        self.known = self.known.with_gradients(gradients)


class Addresses:
    """A table of addresses on the host.

    lines    its rows: addresses of p, g, the fields ...
    tensors  which of the bucket's tensors these are of, by number
    """

    def __init__(self, lines: Sequence[Sequence[int]], tensors: Sequence[int]) -> None:
        self.host = torch.tensor(lines, dtype=torch.int64, device="cpu")
        self.tensors = torch.tensor(tensors, dtype=torch.int64, device="cpu")


class Triton(Kernels):
    """Triton kernels, whose tables are on the device.

    spare  pinned memory from which a CUDA graph may fill a table, one for each; made before there is a graph
    """

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        import triton.language as tl

        self.plan, self.module = bucket.plan, compiled.kernels(bucket.plan)
        if (rule := bucket.variant.rule) and rule.strict:
            _warn_fused(self.device)
        self.grad = getattr(tl, dtype_name(bucket.grad_dtype))
        self.spare: list[Tensor] = []

    def load(self, scalars: Scalars, step_key: int) -> None:
        _tell_compiling(self.plan)
        self._each(compiled.load, scalars, step_key)

    def run(self, scalars: Scalars, step_key: int) -> None:
        self._each(compiled.start, scalars, step_key)

    @abstractmethod
    def _each(self, does: Callable[..., None], scalars: Scalars, step_key: int) -> None:
        """Do `compiled.start` or `compiled.load` for each launch."""

    @abstractmethod
    def addresses(self) -> list[Addresses]:
        """Return the tables of addresses."""

    @abstractmethod
    def take(self, tables: Sequence[Tensor]) -> None:
        """Launch with these tables on the device from now on; a shallow copy of these kernels keeps its own."""

    @abstractmethod
    def tensors(self) -> list[object]:
        """Return what kernels read or write beside the optimizer's own tensors."""

    def _point(self, gradients: list[int]) -> list[Addresses]:
        """Return the tables, with these gradients written into them on the host."""
        found, tables = torch.frombuffer(array("q", gradients), dtype=torch.int64), self.addresses()
        for table in tables:
            table.host[:, 1] = found if len(found) == len(table.host) else found[table.tensors]
        return tables

    def follow(self, gradients: list[int]) -> None:
        with guard(self.device):
            self.take([workspace.sent(table.host, self.device) for table in self._point(gradients)])
        self.known = self.known.with_gradients(gradients)
        self.stock()

    def stock(self) -> None:
        """Make the spare memory, if the step is counted on the device."""
        if self.control is not None and not self.spare:
            pin = self.device.type == "cuda"
            self.spare = [torch.empty_like(table.host, pin_memory=pin) for table in self.addresses()]

    def for_graph(self, bucket: Bucket, now: Signature) -> tuple[Triton, list[Tensor]]:
        """Return kernels for a CUDA graph: these where nothing has moved, else a copy for gradients that lie elsewhere,
        and the memory on the host from which the graph fills its tables, at each run."""
        if now == self.known:
            return self, []
        gradients, spare = now.columns[1], self.spare
        pairs = zip(gradients, self.known.columns[1], strict=False)
        moved = self.known.with_gradients(gradients) != now or any((a ^ b) % ALIGNMENT for a, b in pairs)
        if moved or not spare:
            raise counting.not_ready(f"{state.label(*bucket.first)}, whose gradient lies elsewhere,")
        made, self.spare = copy.copy(self), []
        made.known, made.spare = now, []
        for room, table in zip(spare, self._point(gradients), strict=True):
            room.copy_(table.host)
        made.take([torch.empty_like(room, device=self.device).copy_(room, non_blocking=True) for room in spare])
        return made, spare


@dataclass(frozen=True, slots=True)
class Launch:
    """The tensors of a bucket that one kernel takes, their table on the host, and the launch."""

    aligned: bool
    ragged: bool
    shapes: list[torch.Size]
    addresses: Addresses
    call: compiled.Call


class OneKernel(Triton):
    """The launches of a step of one kernel: one for each kind of tensors, aligned or not, ragged or not."""

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        variant, name = bucket.variant, bucket.variant.function
        self.numbers = workspace.numbers(self.module, variant, bucket.device)
        tile, tiles = tuning.sizes(self.module, name)
        own = tile == self.module.TILE[name]  # else what is planned for it does not hold
        self.options = {"num_warps": tuning.warps, "enable_fp_fusion": False}
        self.options |= _limits(self.module, self.device, name) if own else {}
        self.launches = self._build(now, tile, tiles, old)

    def _build(self, now: Signature, tile: int, per_item: int, old: OneKernel | None) -> list[Launch]:
        block, counted, name = self.variant.block, self.variant.stochastic, self.variant.function
        assert self.variant.single is not None
        scalars, kernel = self.variant.single.stages[0].scalars, getattr(self.module, name)
        columns = [*now.columns, *_of_numbers(self.numbers, len(now.shapes))]
        places = now.places or [layout.place(shape) for shape in now.shapes]
        lines = rows(columns, now.shapes, now.streams, places)
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for i, (line, shape) in enumerate(zip(lines, now.shapes, strict=True)):
            if shape.numel():
                aligned = all(address % ALIGNMENT == 0 for address in line[:-SIZES])
                kind = aligned, stages.is_ragged(shape, block, places[i], counted)
                kinds.setdefault(kind, []).append(i)
        known = {(launch.aligned, launch.ragged): launch for launch in old.launches} if old else {}
        launches = []
        for (aligned, ragged), tensors in kinds.items():
            part, shapes = [lines[i] for i in tensors], [now.shapes[i] for i in tensors]
            before = known.get((aligned, ragged))
            if before is not None and before.shapes == shapes:
                work = before.call.work  # only addresses are new
            else:
                counts = [stages.tiles(shape, block, tile) for shape in shapes]
                work = workspace.sent(stages.work_items(range(len(tensors)), counts, per_item), self.device)
            addresses = Addresses(part, tensors)
            how: dict[str, Any] = dict(grad=self.grad, tiles=per_item, tile=tile, ragged=ragged, aligned=aligned)
            constants = {"SWEEP": compiled.launched(self.module.CONSTANTS[name]["SWEEP"], **how)}
            table = workspace.sent(addresses.host, self.device)
            call = compiled.Call(kernel, table, work, scalars, True, constants, self.options)
            launches.append(Launch(aligned, ragged, shapes, addresses, call))
        return launches

    def _each(self, does: Callable[..., None], scalars: Scalars, step_key: int) -> None:
        with guard(self.device):
            for launch in self.launches:
                does(launch.call, scalars, step_key)

    def runner(self, bucket: Bucket, scalars: Scalars, step_key: int) -> staged.Runner:
        raise AssertionError("a step of one kernel has no parts")

    def addresses(self) -> list[Addresses]:
        return [launch.addresses for launch in self.launches]

    def take(self, tables: Sequence[Tensor]) -> None:
        pairs = zip(self.launches, tables, strict=True)
        self.launches = [replace(x, call=replace(x.call, table=table)) for x, table in pairs]

    def tensors(self) -> list[object]:
        return [*self.numbers, *(x for launch in self.launches for x in (launch.call.table, launch.call.work))]


class Stages(Triton):
    """The launches of a step of several stages, which share one table."""

    def __init__(self, bucket: Bucket, now: Signature, stream: int, old: Any) -> None:
        super().__init__(bucket, now, stream, old)
        self.launches: stages.Plan
        before = old.launches if old else None
        told = functools.partial(_limits, self.module, self.device)
        self.launches = stages.build(bucket, self.module, self.grad, now, before, stage_rows, tuning.rows, told)
        self._addresses: list[Addresses] | None = None

    def _each(self, does: Callable[..., None], scalars: Scalars, step_key: int) -> None:
        with guard(self.device):
            for call in stages.stretch(self.launches):
                does(call, scalars, step_key)

    def runner(self, bucket: Bucket, scalars: Scalars, step_key: int) -> staged.Runner:
        def kernels(begin: int, end: int) -> None:
            with guard(self.device):
                for call in stages.stretch(self.launches, begin, end):
                    compiled.start(call, scalars, step_key)

        yield from staged.drive(bucket, self.launches.room, scalars, step_key, kernels)
        torch.autograd.graph.increment_version(bucket.params)

    def addresses(self) -> list[Addresses]:
        if self._addresses is None:  # few steps need it
            lines = stages.lines(self.launches, self.known, stage_rows)
            places = self.known.places or map(layout.place, self.known.shapes)
            live = [i for i, place in enumerate(places) if place.numel]
            self._addresses = [Addresses(lines, live)] if lines else []
        return self._addresses

    def take(self, tables: Sequence[Tensor]) -> None:
        for table in tables:
            self.launches = stages.moved(self.launches, table)

    def tensors(self) -> list[object]:
        made = self.launches
        return [made.room, *made.kept, *(x for call in made.calls for x in (call.table, call.work))]


@functools.cache
def _tell_compiling(plan: Pair) -> None:
    tell(f"loading the Triton kernels of plan {plan.name}; those new to this machine are compiled, which takes seconds")


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels start on the current device: make that the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Launcher:
    """Keeps the kernels of an optimizer's buckets, with their tables, from step to step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Kernels] = {}
        self._used: dict[tuple[object, ...], Kernels] = {}
        self._alike: Counter[tuple[object, ...]] = Counter()
        self._captured: list[object] = []
        self._capturing = False
        self._pools: dict[int, workspace.Pool] = {}
        self._turns: Counter[int] = Counter()

    def begin(self) -> None:
        """Begin a step: what the step before did not use is dropped; not so where a CUDA graph takes the step up."""
        self._capturing = counting.capturing()
        if not self._capturing:
            self._kept, self._used = self._used, {}
        self._alike.clear()
        self._turns.clear()

    def prepare(self, bucket: Bucket) -> Kernels:
        """Return the bucket's kernels; checks the states whenever an address or size is new."""
        try:
            now = Signature.of(bucket)
        except (KeyError, AttributeError):
            bucket.check()  # says what is missing
            raise
        place = 0  # the buckets of one turn run together, each beside the others
        if bucket.waits:
            self._turns[bucket.turn] += 1
            place = self._turns[bucket.turn]
        if not bucket.variant.model_temps and not self._capturing:
            bucket.pool = self._pools.setdefault(place, workspace.Pool())
        same = (bucket.group, bucket.backend, bucket.variant, bucket.grad_dtype, bucket.device, tuning, bucket.cut)
        alike = (*same, place)  # whose memory tables keep
        self._alike[alike] += 1  # several buckets where parameters have made unequally many steps
        key = (*alike, self._alike[alike])
        with guard(bucket.device):
            if self._capturing:
                return self._for_graph(bucket, now, self._used.get(key))
            stream = torch.cuda.current_stream().cuda_stream if bucket.device.type == "cuda" else 0
            old = self._kept.get(key)
            if old is not None and old.stream != stream:
                old = None
            if old is None or old.known != now:
                bucket.check()
                kind: type[Kernels]
                kind = Native if bucket.backend == "cpp" else Stages if bucket.variant.stages else OneKernel
                old = kind(bucket, now, stream, old)
            if bucket.counted:
                assert isinstance(old, Triton)
                if old.control is None:
                    old.control = counting.Control(bucket.variant.host[1], bucket.device)
                old.stock()
            self._used[key] = old
        return old

    def _for_graph(self, bucket: Bucket, now: Signature, last: Kernels | None) -> Kernels:
        """Return kernels for a graph, and keep them for as long as the optimizer is there."""
        bucket.check()
        if not isinstance(last, Triton) or last.control is None:
            raise counting.not_ready(state.label(*bucket.first))
        made, room = last.for_graph(bucket, now)
        self._captured.append((made, made.tensors(), last.control.tensors(), room))
        return made
