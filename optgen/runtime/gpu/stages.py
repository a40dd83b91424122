"""Triton's launches of a step: of one sweep, or of several stages.

All tensors of a bucket share one table (optgen.runtime.layout.workspace.rows and, behind it, the addresses of dense
operands), and every launch has a list of work items:

    sweep                            (tensor, first tile); tiles of panels are counted matrix by matrix, panels of
                                     rows after panels of rows, from left to right (optgen.runtime.layout.workspace)
    sweep over dense operands        the same of a tensor that no panels fit, and kernels that add the operands up
    finish                           partial results become values
    small work between two sweeps    (tensor, first matrix, end)

Tables and room are kept while the shapes of a bucket's tensors are; where only addresses are new, only the table is
made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.gpu.compiled import Call, launched
from optgen.runtime.layout import layout, workspace
from optgen.runtime.layout.workspace import sent
from optgen.runtime.records import Stage, Temp, sums
from optgen.runtime.work.bucket import Bucket

WIDEST = 2**24
"""Columns of the widest matrix whose panels are addressed by int32 from their first element."""

SMALLEST = 4096
"""Elements of the smallest of many matrices that are walked panel by panel."""

FLAT_TILES = 16
"""Tiles per work item of a sweep over dense operands."""

ENTRIES = 4096
"""Rows, or columns, of matrices that one program takes between two sweeps, where the tensor's are apart."""

BETWEEN = 8
"""Warps of the programs between two sweeps."""

FINISHED = 256
"""Values that a program finishes; lanes of columns."""

TILES = 4
"""Full tiles per work item: amortizes the table look-ups.  They go in pairs, one that is left over by masked parts."""

ROWS = 1
"""Rows per tile of a panel: 1, 2, 4 or 8; in fast maths another number is another order of sums."""


def rows_together(stage: Stage, across: int) -> int:
    """Return the rows per tile of a panel: more where a tile's row loads nothing but 256 gradients."""
    return 4 if across == 256 and stage.reads == ("g",) else ROWS


@dataclass(frozen=True)
class Live:
    """The tensors of a bucket that have elements.

    numbers  which of the bucket's tensors they are
    columns  addresses: of p, of g, of each field
    own      aligned or not, each: what of the addresses the launches depend on
    """

    numbers: list[int]
    shapes: list[torch.Size]
    streams: list[int]
    columns: list[list[int]]
    places: list[layout.Place]
    own: list[bool]

    @classmethod
    def of(cls, now: Now) -> Live:
        shapes, streams, columns, places = now
        places = places or [layout.place(shape) for shape in shapes]
        live = [i for i, place in enumerate(places) if place.numel]

        def some(x: Sequence[Any]) -> list[Any]:
            return [x[i] for i in live]

        columns = [some(column) for column in columns]
        own = [all(column[k] % 16 == 0 for column in columns) for k in range(len(live))]
        return cls(live, some(shapes), some(streams), columns, some(places), own)

    def table(self, room: workspace.Workspace, dense: list[list[int]], staged: bool) -> Tensor:
        """Return the table on the host, with the addresses of dense operands."""
        made = workspace.rows(self.columns, room, self.shapes, self.streams, self.places, staged)
        lines = [line + more for line, more in zip(made, dense, strict=True)]
        return torch.tensor(lines, dtype=torch.int64, device="cpu")


@dataclass(slots=True)
class Launches:
    """The launches of a bucket's step, and what of it may be kept.

    host  the table; `table` is on the device
    ends  after how many calls a stage and all before it are done, those that are functions of matrices not counted
    room  kept alive: the kernels know only its addresses
    """

    live: Live
    room: workspace.Workspace
    dense: list[list[int]]
    host: Tensor
    table: Tensor
    calls: list[Call] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


Now = tuple[list[torch.Size], list[int], list[list[int]], workspace.Places]

Limits = Callable[[str], dict[str, int]]
"""Kernel -> what else the compiler is told of it."""


def build(
    bucket: Bucket, kernels: ModuleType, grad: Any, now: Now, old: Launches | None, limits: Limits
) -> Launches:
    """The launches for tensors of these shapes, stream keys, columns of addresses and places.

    grad   Triton's dtype of the gradients
    old    the launches of the step before
    """
    live, device, staged = Live.of(now), bucket.device, bool(bucket.variant.stages)
    if old is not None and replace(live, columns=[]) == replace(old.live, columns=[]):
        # Only addresses are new.  Earlier launches may still read the old table, so it is another one.
        host = live.table(old.room, old.dense, staged)
        return replace(moved(old, sent(host, device)), live=live, host=host)
    room = workspace.make(bucket.variant, live.shapes, device, bucket.pool)
    room = replace(room, numbers=workspace.numbers(kernels, bucket.variant, device))
    maker = _Maker(bucket, kernels, grad, live, room, limits)
    host = live.table(room, maker.dense, staged)
    maker.make(Launches(live, room, maker.dense, host, sent(host, device)))
    return maker.plan


def moved(plan: Launches, table: Tensor) -> Launches:
    """A copy of a plan with another table of addresses."""
    calls = [replace(x, table=table) if x.table is plan.table else x for x in plan.calls]
    return replace(plan, table=table, calls=calls)


def _sent(lines: list[list[int]], device: torch.device) -> Tensor:
    return sent(torch.tensor(lines, dtype=torch.int64, device="cpu"), device)


class _Maker:
    """Make the calls of a plan, stage by stage."""

    def __init__(
        self, bucket: Bucket, kernels: ModuleType, grad: Any, live: Live, room: workspace.Workspace,
        limits: Limits,
    ) -> None:  # fmt: skip
        self.variant, self.device, self.apart = bucket.variant, bucket.device, bucket.in_parts
        self.kernels, self.grad, self.limits = kernels, grad, limits
        self.shapes, self.own, self.places = live.shapes, live.own, live.places
        self.sizes = [workspace.matrices(shape) for shape in self.shapes]
        variant = self.variant
        self.temps = {t.name: t for t in variant.temps}
        self.values = dict(zip(self.temps, room.columns, strict=False))
        reduced = (t.name for t in variant.reduced)
        self.partials = dict(zip(reduced, room.columns[len(self.temps) :], strict=False))
        self.operands: Tensor | None = None
        self.dense = self._dense()
        self.plan: Launches

    def _fits(self, stage: Stage, i: int) -> bool:
        """True if a tensor's panels hold whole blocks, and are worth a program each."""
        _, rows, columns = self.sizes[i]
        if columns > WIDEST or len(self.shapes[i]) <= 2:
            return columns <= WIDEST
        return columns % stage.block == 0 and rows * columns >= SMALLEST

    def _dense(self) -> list[list[int]]:
        """Addresses of dense operands: room for each tensor that panels do not fit in every sweep."""
        stages = [s for s in self.variant.stages if self._operands(s)]
        count = max((1 + k for s in stages for k in self._operands(s).values()), default=0)
        sizes = [
            0 if all(self._fits(s, i) for s in stages) else math.prod(shape) for i, shape in enumerate(self.shapes)
        ]
        if sum(sizes) * count:
            self.operands = torch.empty(sum(sizes) * count, dtype=torch.float32, device=self.device)
        out, end = [], self.operands.data_ptr() if self.operands is not None else 0
        for size in sizes:
            out.append([end + k * 4 * size for k in range(count)])
            end += count * 4 * size
        return out

    def _operands(self, stage: Stage) -> dict[str, int]:
        """Reduction of a sweep over matrices -> number of its dense operand."""
        of_panels = stage.sums if stage.space == "elem" and stage.matrices else ()
        return {name: i for i, (_, names) in enumerate(of_panels) for name in names}

    def make(self, plan: Launches) -> None:
        """Adds the calls."""
        self.plan = plan
        if self.operands is not None:
            plan.kept.append(self.operands)
        kernels = [s for s in self.variant.stages if not s.on_host]
        if self.variant.single is not None:
            (stage,) = self.variant.single.stages
            kernels = [replace(stage, kernel=self.variant.function, block=self.variant.block)]
        for _, level in groupby(kernels, key=lambda s: s.level):
            stages = list(level)
            if stages[0].space == "elem":
                for stage in stages:
                    self._sweep(stage)
                    if "p" in self.variant.stored_by(stage) and self.variant.views != self.variant.swept:
                        self._encode_columns()
                    self._finish([self.temps[name] for name in stage.temps if name in self.partials])
            else:
                for k in range(len(stages)) if self.apart else (None,):
                    self._between(stages, k)
                    plan.ends += [len(plan.calls)] * (len(stages) if k is None else 1)
                continue
            plan.ends += [len(plan.calls)] * len(stages)

    def _add(
        self, stage: Stage, work: Tensor, constants: dict[str, Any], scalars: tuple[int, ...], **options: int
    ) -> None:
        """Add the launch of a kernel of the plan; sweeps take the key of the step."""
        kernel = getattr(self.kernels, stage.kernel)
        self._call(kernel, self.plan.table, work, constants, scalars, stage.space == "elem", **options)

    def _call(
        self, kernel: Any, table: Tensor, work: Tensor, constants: dict[str, Any],
        scalars: tuple[int, ...] = (), keyed: bool = False, **options: int,
    ) -> None:  # fmt: skip
        if work.shape[0]:
            told = {"num_warps": 4, "enable_fp_fusion": False, **options}
            self.plan.calls.append(Call(kernel, table, sent(work, self.device), scalars, keyed, constants, told))

    def _sweep(self, stage: Stage) -> None:
        groups: dict[tuple[int, tuple[tuple[str, Any], ...]], dict[int, int]] = {}
        for i in range(len(self.shapes)):
            how, count = self._walked(stage, i)
            groups.setdefault(how, {})[i] = count
        for (warps, entries), counts in groups.items():
            usual = self.kernels.CONSTANTS[stage.kernel]["SWEEP"]
            record = launched(usual, grad=self.grad, **dict(entries))
            work = work_items(tuple(counts), tuple(counts.values()), record.tiles)
            # The registers that suffice are counted for wide accesses without masks.
            few = not record.ragged and stage.matrices and record.across < usual.across
            planned = record.aligned and not record.ragged
            limit = self.limits(stage.kernel + "_few" * few) if planned else {}
            self._add(stage, work, {"SWEEP": record}, stage.scalars, num_warps=warps, **limit)
        gathered = [i for i in range(len(self.shapes)) if stage.matrices and not self._fits(stage, i)]
        for name, k in self._operands(stage).items() if gathered else ():
            self._partials(stage, self.temps[name], k, gathered)

    def _encode_columns(self) -> None:
        """Make the views along columns, of tensors that have one: its address is not 0."""
        from optgen.runtime.gpu.codecs import ACROSS, ROWS, encode_columns

        groups: dict[bool, dict[int, int]] = {}
        constants = self.kernels.CONSTANTS[f"{self.variant.function}_columns"]
        for i in (i for i, address in enumerate(self.plan.live.columns[constants["CODES"]]) if address):
            _, rows, across = self.sizes[i]
            aligned = self.own[i] and across % 16 == 0
            groups.setdefault(aligned, {})[i] = rows // ROWS.value * -(-across // ACROSS.value)
        for aligned, counts in groups.items():
            work = work_items(tuple(counts), tuple(counts.values()))
            self._call(encode_columns, self.plan.table, work, {**constants, "ALIGNED": aligned}, num_warps=1)

    def _walked(self, stage: Stage, i: int) -> tuple[tuple[int, tuple[tuple[str, Any], ...]], int]:
        """Return how a sweep walks a tensor, (warps, entries of its record), and the tensor's tiles."""

        def how(**record: Any) -> tuple[int, tuple[tuple[str, Any], ...]]:
            warps = self.kernels.WARPS[stage.kernel]
            return (warps if torch.version.hip is None else max(warps // 2, 1)), tuple(record.items())  # of 64 lanes

        shape, block = self.shapes[i], stage.block
        if self.variant.single is not None:
            tile = self.kernels.TILE[stage.kernel] * (1 if torch.version.hip is None else 2)  # of 64 lanes, as above
            ragged = is_ragged(shape, block, self.places[i], self.variant.stochastic)
            record = dict(tiles=TILES, tile=tile, ragged=ragged, aligned=self.own[i])
            return (1, tuple(record.items())), tiles(shape, block, tile)
        if not stage.matrices:
            tile = self.kernels.TILE[stage.kernel]
            sums_up = any(name in self.partials for name in stage.temps)
            ragged = is_ragged(shape, block, self.places[i], self.variant.stochastic)
            count = tiles(shape, block, tile)
            per_item = self._segment(stage, count) // tile if sums_up else TILES
            return how(tiles=per_item, tile=tile, ragged=ragged, aligned=self.own[i]), count
        if not self._fits(stage, i):
            flat = ("tiles", FLAT_TILES), ("tile", 1), ("ragged", True)
            return (1, flat), tiles(shape, block, max(256, block))
        matrices, height, columns = self.sizes[i]
        rows, across = workspace.panel(self.variant, stage, shape)
        together = rows_together(stage, across)
        per_item = rows // together
        place = self.places[i]
        eights = block > 1 or not (place.width % 8 or place.column % 8)
        aligned = self.own[i] and columns % 16 == 0 and eights
        count = matrices * -(-height // rows) * -(-columns // across) * per_item
        return how(tiles=per_item, tile=together, across=across, aligned=aligned), count

    def _segment(self, stage: Stage, count: int) -> int:
        """Return the elements whose sum is one partial result of a tensor that has so many tiles."""
        tile = self.kernels.TILE[stage.kernel]
        alone = self.kernels.WARPS[stage.kernel] == 1 and not (self.variant.rule and self.variant.rule.strict)
        few = alone and count * tile < 2 * workspace.FEW * sums.SEGMENT
        return max(workspace.SMALL_SEGMENT, tile) if few else sums.SEGMENT

    def _partials(self, stage: Stage, temp: Temp, k: int, tensors: Sequence[int]) -> None:
        """Partial results of a temp, from dense operands."""
        from optgen.runtime.gpu import prelude

        is_max = temp.reduction.endswith("max")
        lines = [[self.dense[i][k], self.partials[temp.name][i], *self.sizes[i]] for i in tensors]
        table = _sent(lines, self.device)
        if temp.space == "col":
            counts = [
                matrices * -(-rows // sums.PANEL_ROWS) * -(-columns // FINISHED)
                for matrices, rows, columns in (self.sizes[i] for i in tensors)
            ]
            work = work_items(range(len(tensors)), counts)
            self._call(prelude.col_partials, table, work, {"LANES": FINISHED, "MAX": is_max, "PANEL": sums.PANEL_ROWS})
            return
        width = sums.panel_columns(stage.block)
        groups: dict[int, list[int]] = {}
        for j, i in enumerate(tensors):
            groups.setdefault(1 << (min(width, self.sizes[i][2]) - 1).bit_length(), []).append(j)
        for lanes, some in groups.items():
            counts = []
            for j in some:
                matrices, rows, columns = self.sizes[tensors[j]]
                counts.append(-(-matrices * rows // 4) * -(-columns // width))
            constants = {"PANEL": width, "LANES": lanes, "MAX": is_max, "ROWS": 4}
            self._call(prelude.row_partials, table, work_items(some, counts), constants)

    def _panel(self, temp: Temp, shape: torch.Size) -> tuple[int, int]:
        return workspace.panel(self.variant, workspace.reducing(self.variant, temp), shape)

    def _finish(self, temps: Iterable[Temp]) -> None:
        """Partial results of temps become their values."""
        from optgen.runtime.gpu import prelude

        groups: dict[bool, list[list[int]]] = {}
        for temp in temps:
            for i, shape in enumerate(self.shapes):
                matrices, rows, columns = self.sizes[i]
                if temp.space == "row":
                    sizes = [1, -(-columns // self._panel(temp, shape)[1]), matrices * rows]
                elif temp.space == "col":
                    sizes = [matrices, -(-rows // self._panel(temp, shape)[0]), columns]
                else:
                    stage = workspace.reducing(self.variant, temp)
                    tile = self.kernels.TILE[stage.kernel]
                    count = tiles(shape, stage.block, tile)
                    sizes = [0, -(-count * tile // self._segment(stage, count)), 1]
                if temp.space in ("row", "col") and not sizes[0] * sizes[2]:
                    continue
                line = [self.partials[temp.name][i], self.values[temp.name][i], *sizes]
                groups.setdefault(temp.reduction.endswith("max"), []).append(line)
        for is_max, lines in groups.items():
            counts = [-(-max(outer, 1) * inner // FINISHED) for _, _, outer, _, inner in lines]
            work = work_items(range(len(lines)), counts)
            self._call(prelude.finish, _sent(lines, self.device), work, {"MAX": is_max, "LANES": FINISHED})

    def _between(self, stages: Sequence[Stage], only: int | None = None) -> None:
        """All small work of a level in one launch, or one of its stages: sums over other ranks stand in between."""
        one, done = ("tensor", "model"), stages if only is None else stages[only : only + 1]
        whole = any(s.space in one for s in done)
        whole |= any(self.temps[name].space in one for s in done for name in s.temps)
        scalars = tuple(dict.fromkeys(k for s in stages for k in s.scalars))
        groups: dict[int, list[list[int]]] = {}
        for i, (matrices, rows, columns) in enumerate(self.sizes):
            widest = max(rows, columns)
            step = max(1, ENTRIES // max(widest, 1))
            lanes = next((n for n in (4, 32) if widest <= n), 256)
            lines = [[i, first, min(first + step, matrices)] for first in range(0, matrices, step)]
            groups.setdefault(lanes, []).extend([[i, 0, matrices]] if whole else lines)
        for lanes, lines in groups.items():
            work = torch.tensor(lines, dtype=torch.int32, device="cpu")
            level = self.kernels.CONSTANTS[stages[0].kernel]["LEVEL"]
            level = launched(level, lanes=lanes, only=-1 if only is None or len(stages) == 1 else only)
            self._add(stages[0], work, {"LEVEL": level}, scalars, num_warps=BETWEEN)


def work_items(tensors: Sequence[int], counts: Sequence[int], per_item: int = 1) -> Tensor:
    """int32 (items, 2) on the host: (tensor row, first tile), for tensors of `counts` tiles, `per_item` tiles each."""
    items = torch.tensor([-(-count // per_item) for count in counts], dtype=torch.int64, device="cpu")
    tensor = torch.repeat_interleave(torch.tensor(tensors, dtype=torch.int64, device="cpu"), items)
    before = torch.repeat_interleave(items.cumsum(0) - items, items)
    first = (torch.arange(len(tensor), device="cpu") - before) * per_item
    return torch.stack((tensor, first), dim=1).to(torch.int32)


def tiles(shape: torch.Size, block: int, tile: int) -> int:
    """Return the number of tiles that cover a tensor, of tile / block blocks each; every row has whole blocks."""
    rows, columns = layout.grid(shape)
    return -(-rows * -(-columns // block) // (tile // block))


def is_ragged(shape: torch.Size, block: int, place: layout.Place, counted: bool) -> bool:
    """Return True if blocks are walked row by row.

    That is where rows end within a block, so that blocks are not flat memory; or where elements are counted, and are
    not numbered one after the other, eights that share a hash side by side: rows are parts of longer ones, or do not
    begin with whole eights.
    """
    rows, columns = layout.grid(shape)
    if columns % block and rows > 1:
        return True
    parted = columns != place.width and rows > 1
    return counted and (parted or (block == 1 and (place.row * place.width + place.column) % 8 != 0))


def stretch(plan: Launches, begin: int = 0, end: int | None = None) -> list[Call]:
    """Return the launches of stages [begin, end), by default of all, in order."""
    ends = [0, *plan.ends]
    return plan.calls[ends[begin] : ends[-1 if end is None else end]]
