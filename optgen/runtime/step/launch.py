"""The tables of addresses that kernels read, and the launches of Triton kernels.

Triton: one launch over all tensors of a bucket.

A kernel gets two small tables on the device instead of tensors: a row of addresses and sizes per tensor
(int64), and a list of work items (tensor row, first tile) (int32).  They are kept between steps and sent
again only when an address or a size changes.  Tensors whose addresses are not multiples of 16 bytes, and
those whose rows end within a block, go to kernels of their own, so that the common kernel may use wide
accesses without masks.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.cpu import cpu, cpu_stages
from optgen.runtime.gpu import compiled, stages
from optgen.runtime.layout import layout, workspace
from optgen.runtime.layout.workspace import Workspace, matrices
from optgen.runtime.records import Variant
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import tell
from optgen.runtime.states import state
from optgen.runtime.step import fast_path
from optgen.runtime.work import counting, staged
from optgen.runtime.work.bucket import Bucket

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
        planned: dict[str, int] = getattr(kernels, "TILES", {})
        # AMD's warps have 64 threads: as many elements for each.
        own = kernels.TILE[function] * (1 if torch.version.hip is None else 2)
        return self.tile or own, self.tiles or planned.get(function, TILES)

    def options(self, kernels: ModuleType, function: str, device: torch.device) -> dict[str, int]:
        """Further keyword arguments of a launch."""
        tile = self.sizes(kernels, function)[0]
        if tile != kernels.TILE[function]:
            return {"TILE": tile}
        return dict(_limits(kernels, device, function))


def _limits(kernels: ModuleType, device: torch.device, function: str) -> dict[str, int]:
    """`limits` on that device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    return limits(kernels, function, torch.cuda.get_device_capability(device)[0])


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


_tuning = Tuning()


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Steps made inside launch kernels that way, in every optimizer of the process: for measuring defaults."""
    global _tuning
    before, _tuning = _tuning, tuning
    fast_path.tunings += 1
    try:
        yield
    finally:
        _tuning = before
        fast_path.tunings += 1


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


def sizes(line: Sequence[int]) -> tuple[int, int]:
    """(numel, columns) of a table row."""
    return line[-SIZES], line[-SIZES + 1]


def is_aligned(line: Sequence[int]) -> bool:
    return all(address % ALIGNMENT == 0 for address in line[:-SIZES])


def is_ragged(line: Sequence[int], block: int, counted: bool) -> bool:
    """Return True if blocks are walked row by row.

    That is where rows end within a block, so that blocks are not flat memory; or where elements are counted, and rows
    are parts of longer ones or do not begin with whole eights (stages.is_apart).
    """
    numel, columns = sizes(line)
    ends_within = columns % block != 0 and numel != columns
    return ends_within or (counted and stages.is_apart(numel, columns, block, line[-3:]))


def tiles(line: Sequence[int], block: int, tile: int, ragged: bool) -> int:
    """Return the number of tiles of `tile` elements that cover a tensor; ragged: of tile / block blocks, row by row."""
    numel, columns = sizes(line)
    if not ragged:
        return -(-numel // tile)
    blocks = numel // columns * -(-columns // block)
    return -(-blocks // (tile // block))


def work_items(counts: Sequence[int], per_item: int) -> Tensor:
    """int32 (items, 2): (tensor row, first tile), for tensors of `counts` tiles, `per_item` tiles each."""
    items = torch.tensor([-(-count // per_item) for count in counts], dtype=torch.int64, device="cpu")
    tensor = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), items)
    before = torch.repeat_interleave(items.cumsum(0) - items, items)
    first = (torch.arange(len(tensor), device="cpu") - before) * per_item
    return torch.stack((tensor, first), dim=1).to(torch.int32)


@dataclass(slots=True)
class Launch:
    """The tensors of a bucket that one kernel takes, and their tables on the device."""

    aligned: bool
    ragged: bool
    sizes: list[tuple[int, int]]
    table: Tensor
    work: Tensor


Places = Sequence[layout.Place] | None
"""The place of each tensor; None: each is all of its logical tensor."""

Signature = tuple[list[torch.Size], list[int], list[list[int]], Places, workspace.Dims]
"""(shapes, stream keys, columns of addresses, places, what columns are made of) of a bucket's tensors: while equal, the
tables hold."""


def signature(bucket: Bucket) -> Signature:
    """Read at every step, so kept to the calls that cannot be saved."""
    params, states = bucket.params, bucket.states
    columns = [[p.data_ptr() for p in params], [g.data_ptr() for g in bucket.grads]]
    columns += [[s[name].data_ptr() for s in states] for name in bucket.variant.names]
    shapes = [p.shape for p in params]
    matrix, dims = bucket.variant.matrix, None
    if bucket.variant.has_axes:
        dims = [layout.column_dims(matrix, shape) for shape in shapes]
    if matrix != "last":
        shapes = [layout.matrix_shape(matrix, shape) for shape in shapes]
    return shapes, bucket.streams, columns, bucket.places, dims


@dataclass(slots=True)
class Tables:
    """The tables that a bucket's kernels read: one for C++, several launches for Triton; `staged`: of a step that takes
    more than one kernel.

    known    the signature, but for what has moved since
    scalars  of a step that is counted on the device
    numbers  tables of numbers that a step of one kernel reads
    spare    pinned memory on the host, a tensor per table of addresses (see `stock`)
    moved    the gradients' addresses now, of those of these numbers
    """

    known: Signature
    launches: list[Launch]
    table: cpu.Table | None = None
    staged: stages.Plan | None = None
    scalars: counting.Control | None = None
    numbers: tuple[Tensor, ...] = ()
    spare: list[Tensor] = field(default_factory=list)
    moved: tuple[Sequence[int], Tensor] | None = None

    @property
    def signature(self) -> Signature:
        """Return the addresses that the tables hold.  Where gradients lie elsewhere at every step, nobody asks."""
        if self.moved is not None:
            shapes, streams, columns, places, dims = self.known
            now = list(columns[1])
            for i, address in zip(self.moved[0], self.moved[1].tolist(), strict=True):
                now[i] = address
            self.known = shapes, streams, [columns[0], now, *columns[2:]], places, dims
            self.moved = None
        return self.known

    def sent(self) -> list[Tensor]:
        """The tables of addresses on the device."""
        if self.staged is not None:
            return [self.staged.table]
        return [launch.table for launch in self.launches]

    def tensors(self) -> list[object]:
        """All that kernels read or write beside the optimizer's own tensors, to be kept alive."""
        if self.staged is not None:
            return [self.staged.room, *self.staged.kept, *(x for call in self.staged.calls for x in call.tables)]
        return [*self.numbers, *(x for launch in self.launches for x in (launch.table, launch.work))]

    def stock(self) -> None:
        """Room on the host from which a graph may fill a table, made before there is one."""
        if not self.spare:
            self.spare = [
                torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=table.device.type == "cuda")
                for table in self.sent()
            ]

    def scalars_on(self, bucket: Bucket) -> counting.Control:
        """The bucket's scalars on its device."""
        if self.scalars is None:
            self.scalars = counting.Control(bucket.variant.host_for(bucket.backend)[1], bucket.device)
        return self.scalars


def _sorted(lines: Sequence[list[int]], block: int, counted: bool) -> dict[tuple[bool, bool], list[list[int]]]:
    """Rows of tensors that have elements, by (aligned, ragged)."""
    parts: dict[tuple[bool, bool], list[list[int]]] = {}
    for line in lines:
        if sizes(line)[0]:
            parts.setdefault((is_aligned(line), is_ragged(line, block, counted)), []).append(line)
    return parts


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels start on the current device: make that the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Launcher:
    """Keeps the tables of an optimizer's buckets from step to step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tables] = {}
        self._used: dict[tuple[object, ...], Tables] = {}
        self._alike: Counter[tuple[object, ...]] = Counter()
        self._captured: list[object] = []
        self._capturing = False

    def begin(self) -> None:
        """A step starts: what the step before did not use is dropped; not so where a CUDA graph takes the step up."""
        self._capturing = counting.capturing()
        if not self._capturing:
            self._kept, self._used = self._used, {}
        self._alike.clear()

    def prepare(self, bucket: Bucket) -> Tables:
        """The bucket's tables; checks the states whenever an address or size is new."""
        try:
            now = signature(bucket)
        except (KeyError, AttributeError):
            bucket.check()  # says what is missing
            raise
        with guard(bucket.device):
            stream = None  # a graph has a stream of its own
            if not self._capturing:
                stream = torch.cuda.current_stream().cuda_stream if bucket.device.type == "cuda" else 0
            place: tuple[object, ...]
            place = (bucket.group, bucket.backend, bucket.variant, bucket.grad_dtype, bucket.device, stream, _tuning)
            place = (*place, bucket.cut)
            self._alike[place] += 1  # several buckets where parameters have made unequally many steps
            key = (*place, self._alike[place])
            if self._capturing:
                return self._for_graph(bucket, now, key)
            old = self._kept.get(key)
            if old is None or old.signature != now:
                bucket.check()
                if bucket.backend == "cpp" and bucket.variant.stages:
                    alike = old is not None and (old.signature[0], old.signature[4]) == (now[0], now[4])
                    same = old.table if old is not None and alike else None
                    old = Tables(now, [], cpu_stages.table(bucket.variant, *now, same))
                elif bucket.backend == "cpp":
                    columns, names = now[2], bucket.variant.names
                    old = Tables(now, [], cpu.table(rows(columns, now[0], now[1], now[3]), len(names)))
                elif bucket.variant.stages:
                    kernels = compiled.kernels(bucket.plan)
                    kept = old.staged if old else None
                    made = stages.build(bucket, kernels, now, kept, stage_rows, _tuning.rows)
                    old = Tables(now, [], staged=made, scalars=old.scalars if old else None)
                else:
                    kernels = compiled.kernels(bucket.plan)
                    numbers = old.numbers if old else workspace.numbers(kernels, bucket.variant, bucket.device)
                    launches = self._build(bucket, now, old, numbers)
                    old = Tables(now, launches, scalars=old.scalars if old else None, numbers=numbers)
            if bucket.counted:
                old.scalars_on(bucket)
                old.stock()
            self._used[key] = old
        return old

    def _for_graph(self, bucket: Bucket, now: Signature, key: tuple[object, ...]) -> Tables:
        """Tables for a graph, and kept for as long as the optimizer is: those of the last step where nothing has moved,
        else such that the graph fills itself."""
        bucket.check()
        last = next((tables for kept, tables in self._used.items() if (*kept[:5], None, *kept[6:]) == key), None)
        if last is None or last.scalars is None or (*last.signature[:2], last.signature[4]) != (*now[:2], now[4]):
            raise counting.not_ready(state.label(bucket.params[0], bucket.names[0]))
        if last.signature != now:
            last = self._moved(bucket, now, last)
        self._captured.append((last, last.tensors(), last.scalars_on(bucket).tensors()))
        return last

    def _moved(self, bucket: Bucket, now: Signature, last: Tables) -> Tables:
        """The same tables for other addresses: nothing is allocated on the host or read."""
        shapes, streams, columns, places, _ = now
        spare, last.spare = last.spare, []
        if last.staged is not None:
            moved = stages.lines(last.staged, now, stage_rows)
            parts = [moved] if moved is not None else []
        else:
            block = bucket.variant.block
            lines = rows([*columns, *_of_numbers(last.numbers, len(shapes))], shapes, streams, places)
            sorted_lines = _sorted(lines, block, bucket.variant.stochastic)
            alike = [(x.aligned, x.ragged, x.sizes) for x in last.launches]
            found = [(aligned, ragged, [sizes(x) for x in part]) for (aligned, ragged), part in sorted_lines.items()]
            parts = list(sorted_lines.values()) if found == alike else []
        if len(parts) != len(last.sent()) or len(spare) != len(parts):
            label = state.label(bucket.params[0], bucket.names[0])
            raise counting.not_ready(f"{label}, whose gradient lies elsewhere,")
        tables = []
        for room, part, old in zip(spare, parts, last.sent(), strict=True):
            room.copy_(torch.tensor(part, dtype=torch.int64, device="cpu"))
            tables.append(torch.empty_like(old).copy_(room, non_blocking=True))
        self._captured.append(spare)  # every run of the graph reads it
        if last.staged is not None:
            return Tables(now, [], None, stages.moved(last.staged, tables[0]), last.scalars)
        made = [replace(x, table=table) for x, table in zip(last.launches, tables, strict=True)]
        return Tables(now, made, None, None, last.scalars, last.numbers)

    def _build(self, bucket: Bucket, now: Signature, old: Tables | None, numbers: Sequence[Tensor]) -> list[Launch]:
        block, function = bucket.variant.block, _function(bucket.variant)
        kernels = compiled.kernels(bucket.plan)
        tile, per_item = _tuning.sizes(kernels, function)
        shapes, streams, columns, places, _ = now
        columns = [*columns, *_of_numbers(numbers, len(shapes))]
        parts = _sorted(rows(columns, shapes, streams, places), block, bucket.variant.stochastic)
        known = {(launch.aligned, launch.ragged): launch for launch in old.launches} if old else {}
        launches = []
        for (aligned, ragged), lines in parts.items():
            shape = [sizes(line) for line in lines]
            before = known.get((aligned, ragged))
            if before is not None and before.sizes == shape:
                work = before.work  # only addresses are new
            else:
                counts = [tiles(line, block, tile, ragged) for line in lines]
                work = work_items(counts, per_item).to(bucket.device)
            table = torch.tensor(lines, dtype=torch.int64, device="cpu").to(bucket.device)
            launches.append(Launch(aligned, ragged, shape, table, work))
        return launches


def prepared(bucket: Bucket, tables: Tables) -> fast_path.PreparedBucket:
    """Return a bucket's launches as the fast path makes them again."""
    if tables.table is not None:
        return fast_path.PreparedBucket(bucket, tables.table)
    shapes, streams, columns, places, _ = tables.signature
    table = cpu.table(rows(columns, shapes, streams, places), len(bucket.variant.names))
    scalars = tables.scalars if bucket.counted else None
    return fast_path.PreparedBucket(bucket, table, starter(bucket, tables), scalars)


def run(bucket: Bucket, tables: Tables, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
    """Launch; the tensors are changed behind autograd's back, so their version counters are moved by hand."""
    starter(bucket, tables)(scalars, step_key)
    torch.autograd.graph.increment_version(bucket.params)


class _Following:
    """A table of addresses on the device that follows the gradients of its tensors.

    lines  its rows: addresses of p, g, the fields ...
    of     which of the gradients these have; None: all, in order
    """

    def __init__(self, lines: Sequence[Sequence[int]], of: Sequence[int] | None) -> None:
        self.host = torch.tensor(lines, dtype=torch.int64, device="cpu")
        self.column = self.host[:, 1]
        self.of = None if of is None else torch.tensor(of, device="cpu")

    def follow(self, gradients: Tensor, sent: Tensor) -> Tensor:
        """The table in the place of the one that was sent: launches that are under way may still read that."""
        self.column.copy_(gradients if self.of is None else gradients[self.of])
        return torch.empty_like(sent).copy_(self.host, non_blocking=True)  # nobody waits: this memory is not pinned


class _Kernels(ABC):
    """The launches of a bucket's step, which is one stretch of kernels; keeps none of its tensors.

    The tables are the launcher's own, and go on being what their signature says: a long step, or a graph, finds them.
    """

    def __init__(self, bucket: Bucket, tables: Tables) -> None:
        self.tables, self.device, self.grad = tables, bucket.device, _grad(bucket)
        self.module = compiled.kernels(bucket.plan)
        self.variant = bucket.variant
        self._following: list[_Following] | None = None

    def follow(self, table: cpu.Table) -> None:
        """See fast_path.Start."""
        if not table.tensors:
            return
        tables = self.tables
        if self._following is None:
            self._following = self._parts()
            self._gradients = torch.frombuffer(table.rows, dtype=torch.int64).view(-1, table.width)[:, 1]
            self._live = [i for i, shape in enumerate(tables.signature[0]) if math.prod(shape)]
        with guard(self.device):
            made = [one.follow(self._gradients, sent) for one, sent in zip(self._following, tables.sent(), strict=True)]
        tables.moved = self._live, self._gradients.clone()
        if tables.staged is not None:
            stages.take(tables.staged, made[0])
        else:
            for launch, new in zip(tables.launches, made, strict=True):
                launch.table = new
        if tables.scalars is not None:
            tables.stock()

    @abstractmethod
    def __call__(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        """See fast_path.Start."""

    @abstractmethod
    def load(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        """Compiles what the same call launches (compiled.load)."""

    @abstractmethod
    def _parts(self) -> list[_Following]:
        """One for each table that is sent."""


def _function(variant: Variant) -> str:
    """Return the name of a variant's kernel among those of its pair."""
    return variant.function if variant.single else variant.kernel_name


class _Single(_Kernels):
    """The launches of a step of one kernel."""

    def __init__(self, bucket: Bucket, tables: Tables) -> None:
        super().__init__(bucket, tables)
        name, self.tuning = _function(bucket.variant), _tuning
        self.kernel: Any = getattr(self.module, name)
        self.options = self.tuning.options(self.module, name, self.device)
        self.options.pop("TILE", None)
        tile, tiles = self.tuning.sizes(self.module, name)
        self.constants = {"GRAD": self.grad, "TILES": tiles, "TILE": tile, **self.module.CONSTANTS.get(name, {})}
        rule = self.variant.single
        self.which = rule.stages[0].scalars if rule else range(self.variant.host_for("triton")[1])

    def __call__(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        self._each(compiled.start, scalars, step_key)

    def load(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        self._each(compiled.load, scalars, step_key)

    def _each(self, does: Callable[..., None], scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        with guard(self.device):
            for launch in self.tables.launches:
                does(
                    self.kernel,
                    launch.work.shape[0],
                    (launch.table, launch.work),
                    scalars,
                    self.which,
                    step_key,
                    self.constants | {"RAGGED": launch.ragged, "ALIGNED": launch.aligned},
                    num_warps=self.tuning.warps,
                    enable_fp_fusion=False,
                    **self.options,
                )

    def _parts(self) -> list[_Following]:
        shapes, streams, columns, places, _ = self.tables.signature
        columns = [*columns, *_of_numbers(self.tables.numbers, len(shapes))]
        lines = [line for line in rows(columns, shapes, streams, places) if sizes(line)[0]]
        parts = list(_sorted(lines, self.variant.block, self.variant.stochastic).values())
        if len(parts) == 1:
            return [_Following(lines, None)]
        number = {id(line): i for i, line in enumerate(lines)}
        return [_Following(part, [number[id(line)] for line in part]) for part in parts]


class _Several(_Kernels):
    """The launches of a step of several stages."""

    def __init__(self, bucket: Bucket, tables: Tables) -> None:
        super().__init__(bucket, tables)
        self.told = functools.partial(_limits, self.module, self.device)

    def __call__(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        assert self.tables.staged is not None
        with guard(self.device):
            stages.run(self.tables.staged, self.module, self.grad, scalars, step_key, self.told)

    def load(self, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
        assert self.tables.staged is not None
        with guard(self.device):
            stages.load(self.tables.staged, self.module, self.grad, scalars, step_key, self.told)

    def _parts(self) -> list[_Following]:
        assert self.tables.staged is not None
        lines = stages.lines(self.tables.staged, self.tables.signature, stage_rows)
        assert lines is not None  # of the addresses that the plan was made for
        return [_Following(lines, None)]


def _grad(bucket: Bucket) -> Any:
    """Triton's dtype of a bucket's gradients."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[bucket.grad_dtype]


def load(bucket: Bucket, tables: Tables, scalars: Sequence[float] | counting.Control, step_key: int) -> None:
    """Compiles what a bucket's step launches, before any bucket is stepped: what a compiler or a device refuses is
    refused while all is as it was."""
    _tell_compiling(bucket.plan)
    starter(bucket, tables).load(scalars, step_key)


def starter(bucket: Bucket, tables: Tables) -> _Kernels:
    """The launches of a bucket's step, which is one stretch of kernels."""
    return _Single(bucket, tables) if tables.staged is None else _Several(bucket, tables)


def runner(bucket: Bucket, tables: Tables, scalars: Sequence[float] | counting.Control, step_key: int) -> staged.Runner:
    """The step of a bucket that is more than one stretch of kernels (see staged.py)."""
    plan = tables.staged
    assert plan is not None
    own, grad = compiled.kernels(bucket.plan), _grad(bucket)
    told = functools.partial(_limits, own, bucket.device)

    def kernels(begin: int, end: int) -> None:
        with guard(bucket.device):
            stages.run(plan, own, grad, scalars, step_key, told, begin, end)

    yield from staged.drive(bucket, plan.room, scalars, kernels)
    torch.autograd.graph.increment_version(bucket.params)


@functools.cache
def _tell_compiling(plan: Pair) -> None:
    tell(f"loading the Triton kernels of plan {plan.name}; those new to this machine are compiled, which takes seconds")
