"""The kernels of a rule under a plan: a rule's tile functions, and records of how the plan keeps its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl

from optgen.runtime.gpu import small_work
from optgen.runtime.gpu.codecs import FULL, Codec, StoredValue, StoredView
from optgen.runtime.gpu.matrices import Panels
from optgen.runtime.gpu.prelude import KEEPS_LAYOUTS
from optgen.runtime.gpu.small_work import Level, Round
from optgen.runtime.gpu.walk import KernelSweep
from optgen.runtime.records import COPY, EIGHT, Field, Rule, Stage, Temp, Variant, View
from optgen.runtime.records.join import Pair
from optgen.runtime.records.sums import SEGMENT, panel_columns

TILE = 256
"""Elements: 8 per thread of one warp; more per thread turns 128-bit accesses into strided ones."""

LEAST = 128
"""Elements of a masked tile: they come one by one, in a register each, and spill where there are many."""

_EIGHTS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""Bits of a code -> a word of eight codes."""

_SIZES = {"rows": 6, "columns": 7, "elements": 8}
"""Sizes of the logical tensor -> their places behind the number of elements in a row of the table."""


def kernels(pair: Pair, rule: ModuleType, codecs: ModuleType) -> Any:
    """Return the kernels of a pair as attributes, beside TILE, OPTIONS, CONSTANTS, WARPS and NUMBERS of each."""
    out = SimpleNamespace(TILE={}, OPTIONS={}, CONSTANTS={}, NUMBERS={}, WARPS={})
    for variant in pair.variants:
        if variant.rule is not None:
            _add(out, variant, variant.rule, rule, codecs)
    return out


def _add(out: Any, variant: Variant, steps: Rule, rule: ModuleType, codecs: ModuleType) -> None:
    """Add the kernels of a variant."""
    frame = Frame.of(variant, codecs)
    out.NUMBERS[variant.function] = frame.numbers
    for view in (x for x in variant.views if x.transposed):
        places = dict(WIDTH=frame.width, CODES=frame.columns[view.fields[0].name], NUMEL=frame.numel)
        codec, dtype = frame.views[view.name], getattr(tl, variant.param)
        out.CONSTANTS[f"{variant.function}_columns"] = dict(CODEC=codec, DTYPE=dtype, **places)
    if not variant.stages:
        _add_sweep(out, variant.function, variant, steps.stages[0], frame, rule)
        return
    names = {stage: own.kernel for own, stage in zip(variant.stages, steps.stages, strict=True)}
    for stage in steps.stages:
        if stage.space == "elem":
            _add_sweep(out, names[stage], variant, stage, frame, rule)
    small = [s for s in steps.stages if s.space != "elem" and not s.on_host]
    for _, level in groupby(small, key=lambda s: s.level):
        first, *more = level
        own = first.state or first.kernel == COPY
        setattr(out, names[first], small_work.of_states if own else getattr(rule, f"{first.kernel}_between"))
        rounds = tuple(_round(variant, frame, stage) for stage in (first, *more))
        out.CONSTANTS[names[first]] = {"LEVEL": Level(frame.width, rounds)}


def _add_sweep(out: Any, name: str, variant: Variant, stage: Stage, frame: Frame, rule: ModuleType) -> None:
    record = sweep(variant, stage, frame)
    setattr(out, name, getattr(rule, f"{stage.kernel}_sweep"))
    out.CONSTANTS[name] = {"SWEEP": record}
    if isinstance(record, Panels):
        out.WARPS[name] = _warps(record.across)
        limit = _panel_registers(variant, record)
        if few := _few_registers(record, limit):
            out.OPTIONS[f"{name}_few"] = {"maxnreg": few}
    else:
        tile = _tile(record)
        # For one warp a segment takes 20 us, whatever the device; codes of wider tiles would cross warps.
        shared = record.sums and not record.stores and not record.strict
        out.WARPS[name] = min(4, SEGMENT // (2 * tile)) if shared else 1
        out.TILE[name] = tile * out.WARPS[name]
        limit = registers(variant, record, tile)
    if limit:
        out.OPTIONS[name] = {"maxnreg": limit}


@dataclass(frozen=True)
class Frame:
    """The entries of a row of the table of a variant's step (optgen.runtime.layout.workspace.rows).

    columns   value that lies in memory -> entry of its address
    partials  temp that sweeps reduce -> entry of the address of partial results
    tables    codec -> positions of its tables among `numbers`
    numbers   the tables of numbers that codecs read from memory
    first     the entry of their first address
    matrices  the entry that is the number of matrices; -1: of one sweep there is none
    numel     the entry that is the number of elements
    views     the codecs of views, by name
    """

    columns: dict[str, int]
    partials: dict[str, int]
    codecs: dict[str, Codec]
    tables: dict[int, tuple[int, ...]]
    numbers: tuple[tuple[float, ...], ...]
    first: int
    matrices: int
    numel: int
    width: int
    views: dict[str, Codec]

    @classmethod
    def of(cls, variant: Variant, codecs: ModuleType) -> Frame:
        """Return the frame of a variant."""
        found = {owner: getattr(codecs, name) for owner, name in variant.eager.codecs.items() if name}
        numbers: list[tuple[float, ...]] = []
        tables: dict[int, tuple[int, ...]] = {}
        for codec in dict.fromkeys(found.values()):
            tables[id(codec)] = tuple(range(len(numbers), len(numbers) + len(codec.tables)))
            numbers += codec.tables
        first = len(variant.columns) + len(variant.reduced)
        numel = first + len(numbers)
        matrices, width = -1, numel + 6
        if variant.stages:
            matrices, numel = numel, numel + 3
            of_panels = [len(s.sums) for s in variant.stages if s.space == "elem" and s.matrices]
            width = numel + 9 + max(of_panels, default=0)
        columns = {name: i for i, name in enumerate(variant.columns)}
        partials = {t.name: len(columns) + i for i, t in enumerate(variant.reduced)}
        views = {view.name: getattr(codecs, view.name) for view in variant.views}
        return cls(columns, partials, found, tables, tuple(numbers), first, matrices, numel, width, views)

    def extents(self, stage: Stage) -> tuple[int, ...]:
        """Return the entries of the sizes that a stage computes with."""
        return tuple(self.numel + _SIZES[x] for x in stage.extents)


def sweep(variant: Variant, stage: Stage, frame: Frame) -> KernelSweep:
    """Return the record of a sweep."""
    rule = variant.rule
    assert rule is not None
    values = _Values(variant, stage, frame)
    kept = tuple(map(values.kept, values.owners))
    temps = {t.name: t for t in variant.temps}
    fields = variant.stored
    buffers = tuple((frame.columns[x], *_buffer(variant, fields.get(x), temps.get(x), x)) for x in values.touched)
    counted = any(x.word >= 0 for x in kept)
    block = variant.block_in(stage)
    made: dict[str, Any] = dict(
        width=frame.width,
        numel=frame.numel,
        buffers=buffers,
        block=block,
        counted=counted,
        tables=tuple(range(frame.first, frame.first + len(frame.numbers))),
        extents=frame.extents(stage),
        strict=rule.strict and bool(stage.sums),
        values=kept,
        taken=len(stage.reads),
        stores=tuple((values.owners.index(x), stage.stores.index(x)) for x in values.stores),
        views=values.views,
        summed=_summed(stage),
        words=variant.eager.words if counted else (),
    )
    if stage.matrices:
        return _panels(stage, frame, temps, made)
    record = KernelSweep(sums=_terms(frame, temps, stage, ("tensor", "model")), **made)
    # Masked elements come one by one, in a register each: few at a time, lest registers spill, and then with sums of
    # their own.  In strict maths sums need the lanes of a whole tile.
    return replace(record, parts=1 if record.strict else _tile(record) // LEAST)


def _panels(stage: Stage, frame: Frame, temps: Mapping[str, Temp], made: Mapping[str, Any]) -> Panels:
    """Return the record of a sweep over panels, with what it has in common with those over segments."""
    block, buffers = made["block"], made["buffers"]
    across = panel_columns(block)
    read = [i for x in made["values"][: len(stage.reads)] for i in x.fields]
    halves = (i for i in read if buffers[i][0] == 1 or (not buffers[i][2] and _bits(buffers[i][1]) in (8, 16)))
    return Panels(
        sums=_terms(frame, temps, stage, ("row",), ("col",)),
        matrices=frame.matrices,
        part=min(max(256 * _warps(across), block), across),
        anchor=next(halves, -1) if made["counted"] else -1,
        across=across,
        **made,
    )


class _Values:
    """The values of a sweep, as a plan keeps them.

    live    names of those that it reads, stores or reads the roots of
    owners  these in the order of the record: first all that the tile function takes
    stores  names of those that it stores: the weight, then what others are divided by, since `Eager.relative` holds
            their roots to what is stored
    """

    def __init__(self, variant: Variant, stage: Stage, frame: Frame) -> None:
        self.variant, self.stage, self.frame, self.eager = variant, stage, frame, variant.eager
        self.live = variant.owners_in(stage)
        self.owners = list(dict.fromkeys((*stage.reads, *self.live)))
        bases = set(self.eager.relative.values())
        self.stores = sorted(variant.stored_by(stage), key=lambda x: (x != "p", x not in bases))
        self.read = {x: [y for y in variant.read_from(x) if y in frame.columns] for x in self.live}

    @cached_property
    def rooted(self) -> list[str]:
        """Names of the stored values that others may be divided by."""
        return [x for x in self.stores if self.codec(x).root is not None]

    @cached_property
    def clean(self) -> bool:
        """True if no -0 is read of a nonnegative state."""
        return all(self.codec(x).plus for x in self.live if x in self.variant.nonneg)

    @cached_property
    def given(self) -> dict[str, list[str]]:
        """Stored value that is kept as a whole -> names of what it is encoded with."""
        whole = self.eager.whole
        return {x: [f"{x}_{k}" for k in whole[x].encode] for x in self.stores if x in whole}

    @property
    def shown(self) -> tuple[View, ...]:
        """The views that it stores."""
        return self.variant.swept if "p" in self.stores else ()

    @property
    def views(self) -> tuple[StoredView, ...]:
        """The records of the views that it stores."""
        out = []
        for view in self.shown:
            *stores, last = self.places(f.name for f in view.fields)
            places = (tuple(stores), last) if view.scaled else ((*stores, last), -1)
            out.append(StoredView(self.frame.views[view.name], view.size, *places))
        return tuple(out)

    @cached_property
    def touched(self) -> list[str]:
        """Names of the columns that the sweep touches."""
        used = {name for names in (*self.read.values(), *self.given.values()) for name in names}
        used |= {f.name for view in self.shown for f in view.fields}
        return [x for x in self.frame.columns if x in used]

    def is_stored(self, owner: str, column: str) -> bool:
        """Return True if a sweep that stores a value writes this column of it."""
        return owner not in self.eager.whole or self.variant.spaces[column] == "elem"

    def codec(self, owner: str) -> Codec:
        return self.frame.codecs.get(owner, FULL)

    def places(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the positions of columns among those that the sweep touches."""
        return tuple(map(self.touched.index, names))

    def kept(self, owner: str) -> StoredValue:
        """Return the record of a value."""
        direct = _is_direct(self.variant, owner)
        if owner not in self.live:
            return StoredValue(owner, FULL, (), (), direct=direct, absent=True)
        codec, stored, eager = self.codec(owner), owner in self.stores, self.eager
        word, shift = eager.noise.get(owner, (-1, 0))
        base = eager.relative.get(owner)
        return StoredValue(
            owner,
            codec,
            self.places(self.read[owner]),
            self.places(x for x in self.read[owner] if self.is_stored(owner, x)),
            self.places(self.given.get(owner, ())),
            self.frame.tables.get(id(codec), ()),
            base=-1 if base is None else self.owners.index(base),
            root=-1 if base is None or not stored else self.rooted.index(base),
            unrounded=stored and owner in eager.unrounded,
            word=word if codec.encode is not None and stored else -1,
            shift=shift,
            plus=codec.plus and not (self.clean and self.is_positive(owner)),
            guarded=codec.guards and owner in self.stage.picked,
            direct=direct,
        )

    def is_positive(self, owner: str) -> bool:
        """Return True if no new value of a state is negative, or -0 where no state that is read is."""
        stage = self.stage
        return owner in self.variant.nonneg and owner in stage.stores and owner not in stage.zeros


def _is_direct(variant: Variant, owner: str) -> bool:
    """Return True for a value of which there are few, or a temp."""
    return owner not in ("p", "g") and not any(f.owner == owner and f.wide for f in variant.fields)


def _summed(stage: Stage) -> tuple[int, ...]:
    """Return the positions of the factors of terms in what a tile function returns: new values, then those of terms."""
    if stage.reduces:
        return tuple(stage.stores.index(x) for x in stage.reduces)
    count = sum(len({*_FACTORS.get(kind, (0,))}) for kind, _ in stage.sums)
    return tuple(range(len(stage.stores), len(stage.stores) + count))


_FACTORS = {"square": (0, 0), "product": (0, 1)}
"""Kinds of terms that are products -> their factors among what the tile function returns for a term."""


def _terms(frame: Frame, temps: Mapping[str, Temp], stage: Stage, *spaces: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the terms of a sweep, see `KernelSweep.sums`, with the entries of partial results of these spaces."""
    out, first = [], 0
    for kind, names in stage.sums:
        factors = tuple(first + k for k in _FACTORS.get(kind, (0,)))
        entries = (tuple(frame.partials[x] for x in names if temps[x].space in some) for some in spaces)
        out.append((kind == "max", factors, *entries))
        first = max(factors) + 1
    return tuple(out)


_ONE = ("tensor", "model")

def _round(variant: Variant, frame: Frame, stage: Stage) -> Round:
    assert variant.rule is not None
    columns = frame.columns
    values = small_work.copy if stage.kernel == COPY else None
    if stage.state:
        values = frame.codecs[stage.state].small[int(stage.kernel.removeprefix("small_")) - 1]
    spaces = variant.spaces

    def kind(name: str) -> str:
        of = spaces[name]
        if stage.space in _ONE or of == stage.space:
            return ""
        return "one" if of in _ONE else of

    sums: list[tuple[bool, tuple[int, ...], tuple[int, ...]]] = []
    for reduction, names in stage.sums:
        matrices, whole = ([columns[x] for x in names if (spaces[x] in _ONE) is one] for one in (False, True))
        sums.append((reduction == "max", tuple(matrices), tuple(whole)))
    return Round(
        "one" if stage.space in _ONE else stage.space,
        tuple((columns[x], kind(x)) for x in stage.reads),
        tuple(columns[x] for x in stage.stores),
        tuple(sums),
        frame.extents(stage),
        frame.matrices,
        variant.rule.strict,
        values,
    )


def _buffer(variant: Variant, field: Field | None, temp: Temp | None, name: str) -> tuple[Any, str]:
    """Return the dtype and the kind of a buffer; see Sweep."""
    if field is not None:
        if field.width > 1 or field.per == EIGHT:
            return _EIGHTS[field.width], "eight"
        return getattr(tl, field.dtype), "block" if field.per > 1 else _kind(field.space)
    if temp is not None:
        return tl.bfloat16 if temp.space == "elem" and not temp.wide else tl.float32, _kind(temp.space)
    return None if name == "g" else getattr(tl, variant.param), ""


def _kind(space: str) -> str:
    """Return the kind of a buffer with values of a space."""
    return "one" if space in _ONE else "" if space == "elem" else space


def _bits(dtype: Any) -> int:
    return int(dtype.primitive_bitwidth)


def _tile(record: KernelSweep) -> int:
    """Return the elements per tile of a sweep over segments.

    Twice as many where only bytes are stored, beside sums: 16 codes of a thread are one 128-bit access, and what is
    computed once per block, or crosses threads, is worth twice the elements.  Strict maths adds lanes in their order.
    """
    stored = [i for k, _ in record.stores for i in record.values[k].fields]
    bits = {record.bits(i) if record.kind(i) == "eight" else _bits(record.buffers[i][1]) for i in stored
            if record.kind(i) in ("", "eight")}  # fmt: skip
    wide = not record.strict and bits == {8} and bool(record.sums) and record.block > 1
    return max(2 * TILE if wide else TILE, record.block)


def _warps(panel: int) -> int:
    """Return the warps that share a row of a panel: what crosses threads once per row is worth 32 elements of each."""
    return min(max(panel // 1024, 1), 32)  # no device runs more together


def _panel_registers(variant: Variant, record: Panels) -> int | None:
    """Return the registers per thread that a panel's kernel fits in, counted on sm_80 to sm_100.

    Compilers left alone begin all parts of a row at a time where one state's codes are all that is kept; sums of
    columns, which stay in registers, leave them room for one term.
    """
    states = {record.values[k].name for k, _ in record.stores} & set(variant.states)
    if record.strict or record.block == 1 or len(states) != 1 or not record.sums:
        return None
    if any(columns for *_, columns in record.sums):
        return 136 if len(record.sums) == 1 else None
    return 96 if len(record.sums) == 1 else 128


def _few_registers(record: Panels, limit: int | None) -> int | None:
    """Return the same for the smaller panels of a matrix that has few: as many as a processor holds at a time."""
    of_columns = any(columns for *_, columns in record.sums)
    if limit:
        return limit if of_columns else limit - 32
    if record.stores and of_columns:  # those fit in 64 where nothing says 128
        return None
    return 128 if record.stores and (record.sums or record.packed()) else 64


def registers(variant: Variant, record: KernelSweep, tile: int) -> int | None:
    """Return the registers per thread that a kernel is expected to fit in, counted on sm_80 to sm_100; None: no limit.

    Where it spills all the same, the first step compiles it with more (optgen.runtime.gpu.compiled.without_spills).
    """
    states = [x for x in record.values if x.name in variant.states]
    if len(states) > 2:
        return _registers_of_many(record)
    if tile > max(TILE, record.block):
        # With two terms compilers spill at 136 (Triton 3.6), and 8 bytes again at 144 to 160 (Triton 3.9).
        full = any(dtype is not None and _bits(dtype) == 32 and not kind for _, dtype, kind in record.buffers)
        older = len(record.sums) > 1 and not KEEPS_LAYOUTS.value
        return 120 + 8 * len(record.sums) + 16 * full + 8 * older
    if any(x.codec.lines for x in states):
        return None  # lines of 8-bit maps: told a limit, compilers spill 8 bytes below and above the 104 that they take
    # Codes of 5 to 7 bits come in pieces, each with an address and a word of its own.
    in_pieces = any(sum(record.kind(i) == "eight" for i in x.fields) > 1 for x in states)
    most = 96 if _is_wide(variant, record, states) else 64
    return most + 16 * in_pieces + (32 if record.strict else 16) * len(record.sums)


def _registers_of_many(record: KernelSweep) -> int | None:
    """Return the same for more than two states.  Left alone, compilers take 168 and 242 for D-Adaptation's sums."""
    stores = len(record.stores)
    return 64 + 16 * stores if record.sums and stores > 2 and not record.strict else None


def _is_wide(variant: Variant, record: KernelSweep, states: Iterable[StoredValue]) -> bool:
    """Return True if elements take half as many registers more than usual.

    Rounding f16 stochastically by its bits holds two ways of it at a time, of normal and of subnormal numbers; sums
    hold 8 lanes for each thread, and what is added to them, in an order of their own in strict maths.  The lines of a
    table, a small tree of its entries, or the places of a search, are in flight for eight elements at a time.
    """
    dtypes = {variant.param, *(f.dtype for f in variant.fields)}
    return (record.counted and "float16" in dtypes) or any(x.codec.looks_up for x in states)
