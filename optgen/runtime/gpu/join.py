"""The kernels of a rule under a plan: a rule's tile functions, and records of how the plan keeps its values."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl

from optgen.runtime.gpu.codecs import FULL, Codec, Kept
from optgen.runtime.gpu.walk import Sweep
from optgen.runtime.records import Field, Stage, Variant
from optgen.runtime.records.join import Pair

TILE = 256
"""Elements: 8 per thread of one warp; more per thread turns 128-bit accesses into strided ones."""

LEAST = 128
"""Elements of a masked tile: they come one by one, in a register each, and spill where there are many."""

_EIGHTS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""Bits of a code -> a word of eight codes."""

_SIZES = {"rows": 6, "columns": 7, "elements": 8}
"""Sizes of the logical tensor -> their places behind the number of elements in a row of the table."""


def kernels(
    pair: Pair, rule: ModuleType | None, codecs: ModuleType | None, generated: ModuleType | None
) -> Any:
    """Return the kernels of a pair as attributes, beside TILE, OPTIONS, CONSTANTS and NUMBERS of each.

    generated  the module of kernels that were generated for the pair: those of several stages
    """
    out = SimpleNamespace(**(vars(generated) if generated else {}))
    for name in ("TILE", "OPTIONS", "CONSTANTS", "NUMBERS"):
        setattr(out, name, dict(getattr(out, name, {})))
    for variant in pair.variants:
        if rule is None or codecs is None or variant.single is None:
            continue
        (stage,) = variant.single.stages
        name = variant.function
        record = sweep(variant, stage, codecs)
        setattr(out, name, getattr(rule, f"{stage.kernel}_sweep"))
        out.TILE[name] = max(TILE, variant.block)
        out.CONSTANTS[name] = {"SWEEP": record}
        out.NUMBERS[name] = tuple(x for codec in _distinct(record.values) for x in codec.tables)
        if limit := registers(variant, record):
            out.OPTIONS[name] = {"maxnreg": limit}
    return out


def _distinct(values: tuple[Kept, ...]) -> list[Codec]:
    return list({id(x.codec): x.codec for x in values}.values())


def sweep(variant: Variant, stage: Stage, codecs: ModuleType) -> Sweep:
    """Return the record of a single sweep."""
    eager = variant.eager
    assert eager is not None
    stores = [x for x in stage.stores if x not in eager.still]
    owners = [*stage.reads, *(x for x in stores if x not in stage.reads)]
    owners += [x for name, x in eager.relative.items() if name in owners and x not in owners]  # whose roots are read
    columns = {name: i for i, name in enumerate(("p", "g", *variant.names))}
    fields = {f.name: f for f in variant.fields}
    touched = [x for x in columns if x in ("p", "g") or fields[x].owner in owners]
    found = {x: _codec(variant, x, codecs) for x in owners}
    tables: dict[int, tuple[int, ...]] = {}
    count = 0
    for codec in dict.fromkeys(found.values()):
        tables[id(codec)] = tuple(range(count, count + len(codec.tables)))
        count += len(codec.tables)
    # The weight comes first, then what others are divided by: `Eager.relative` holds their roots to what is stored.
    bases = set(eager.relative.values())
    order = sorted(stores, key=lambda x: (x != "p", x not in bases))
    rooted = [x for x in order if found[x].root is not None]
    clean = all(found[x].plus for x in owners if x in variant.nonneg)  # no -0 is read
    values = []
    for x in owners:
        own = [i for i, name in enumerate(touched) if name == x or (name in fields and fields[name].owner == x)]
        word, shift = eager.noise.get(x, (-1, 0))
        base = eager.relative.get(x)
        values.append(
            Kept(
                x,
                found[x],
                tuple(own),
                tables[id(found[x])],
                base=-1 if base is None else owners.index(base),
                root=-1 if base is None or x not in stores else rooted.index(base),
                word=word if found[x].encode is not None else -1,
                shift=shift,
                plus=found[x].plus and not (x in stage.plus and clean),
                guarded=found[x].guards and x in stage.picked,
            )
        )
    numel = len(columns) + count
    return Sweep(
        numel + 6,
        numel,
        tuple((columns[x], *_buffer(variant, fields.get(x), x)) for x in touched),
        block=variant.block,
        parts=max(TILE, variant.block) // LEAST,
        counted=bool(eager.words),
        keys=("step", "stream") if eager.words else (),
        tables=tuple(range(len(columns), len(columns) + count)),
        extents=tuple(numel + _SIZES[x] for x in stage.extents),
        values=tuple(values),
        taken=len(stage.reads),
        stores=tuple((owners.index(x), stage.stores.index(x)) for x in order),
        words=eager.words,
    )


def _codec(variant: Variant, owner: str, codecs: ModuleType) -> Codec:
    assert variant.eager is not None
    name = variant.eager.codecs.get(owner, "")
    found: Codec = getattr(codecs, name) if name else FULL
    return found


def _buffer(variant: Variant, field: Field | None, name: str) -> tuple[Any, str]:
    """Return the dtype and the kind of a buffer; see Sweep."""
    if name == "g":
        return None, ""
    if field is None:
        return getattr(tl, variant.param), ""
    if field.width > 1 or field.per == 8:
        return _EIGHTS[field.width], "eight"
    kind = "one" if field.space == "tensor" else "block" if field.per > 1 else ""
    return getattr(tl, field.dtype), kind


def registers(variant: Variant, record: Sweep) -> int | None:
    """Return the registers per thread that a kernel is expected to fit in, counted on sm_80 to sm_100; None: no limit.

    Where it spills all the same, the first step compiles it with more (optgen.runtime.gpu.compiled.without_spills).
    """
    states = [x for x in record.values if x.name not in ("p", "g")]
    if len(states) > 2:
        return None
    if any(x.codec.lines for x in states):
        return None  # lines of 8-bit maps: told a limit, compilers spill 8 bytes below and above the 104 that they take
    # Rounding f16 stochastically by its bits holds two ways of it at a time, of normal and of subnormal numbers.
    dtypes = [variant.param, *(f.dtype for f in variant.fields)]
    most = 96 if record.counted and "float16" in dtypes else 64
    # Tables: the lines of one, a small tree of its entries, or the places of a search, are in flight for eight
    # elements at a time.
    if any(x.codec.looks_up for x in states):
        most = max(most, 96)
    # Codes of 5 to 7 bits come in pieces, each with an address and a word of its own.
    eights = [[i for i in x.fields if record.kind(i) == "eight"] for x in states]
    return most + 16 * any(len(own) > 1 for own in eights)
