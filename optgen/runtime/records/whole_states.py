"""Divide a rule's step where a plan keeps states as a whole, by numbers of rows and columns.

No tile of such a state can be encoded before all of its new value was seen: the sweep that stores it is walked twice.
Its first walk stores nothing and reduces the new value by rows and columns, small work makes the new vectors of them,
and the second walk encodes under these.  The vectors that reading needs are replaced behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from optgen.runtime.records import COPY, Stage, Temp, Variant, Whole


def divided(variant: Variant) -> Variant:
    """Return a variant whose step has the stages that its states need that are kept as a whole."""
    kept, rule = variant.eager.whole, variant.rule
    if not kept or rule is None:
        return variant
    touched = {x for s in rule.stages if s.space == "elem" for x in variant.owners_in(s)}
    needed = {name: whole for name, whole in kept.items() if name in touched}
    sums, temps = _by_rows(variant.temps)
    levels: list[list[Stage]] = [[s for name, x in needed.items() for s in _small(name, x.before)]]
    for _, level in groupby(rule.stages, key=lambda s: s.level):
        levels += _around(variant, list(level), sums, temps)
    stages = tuple(replace(s, level=k) for k, level in enumerate(levels, -1) for s in level)
    own = (*temps.values(), *_of_states(needed, {x for s in stages for x in s.temps}))
    return replace(variant, rule=replace(rule, stages=stages), temps=own)


def _of_states(needed: Mapping[str, Whole], left: Collection[str]) -> Iterator[Temp]:
    """Yield the temps of states that are kept as a whole; of one that stays no new value is reduced."""
    for name, whole in needed.items():
        own = (replace(t, name=f"{name}_{t.name}") for t in whole.temps)
        yield from (t for t in own if t.source != "elem" or t.name in left)


def _around(
    variant: Variant, level: Sequence[Stage], sums: Mapping[str, str], temps: Mapping[str, Temp]
) -> Iterator[list[Stage]]:
    """Yield the stages of a level and those that its states need, level by level."""
    kept, new = variant.eager.whole, _new(variant, level)
    sweeps = [s for s in level if s.space == "elem"]
    yield [_first_walk(s, new) for s in sweeps if not new.keys().isdisjoint(s.stores)]
    yield [s for name, whole in new.items() for s in _small(name, whole.between)]
    yield [_walk(s, sums, kept.keys() & {*variant.owners_in(s)}) if s in sweeps else s for s in level]
    yield [_total(sums[x], temps[x]) for s in sweeps for x in s.temps if x in sums]
    yield list(_copies(new))


def _new(variant: Variant, level: Iterable[Stage]) -> dict[str, Whole]:
    """Return the states that are kept as a whole and have a new value in these stages, with the work for each."""
    kept, still = variant.eager.whole, variant.eager.still
    return {x: kept[x] for s in level for x in s.stores if x in kept and x not in still}


def _by_rows(temps: Iterable[Temp]) -> tuple[dict[str, str], dict[str, Temp]]:
    """Return what a sweep sums over the tensor with the sums of rows that it goes by, and all temps of the rule then.

    Panels have sums of rows and columns only.
    """
    sums: dict[str, str] = {}
    out: dict[str, Temp] = {}
    for t in temps:
        if t.space == "tensor" and t.source == "elem":
            sums[t.name] = f"{t.name}_rows"
            out[sums[t.name]] = Temp(sums[t.name], "row", t.reduction.replace("tensor", "row"), "elem")
            t = replace(t, source="row")
        out[t.name] = t
    return sums, out


def _small(state: str, stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield the small work of a format for a state."""
    return (s.renamed(f"{state}_{{}}".format, state) for s in stages)


def _first_walk(stage: Stage, new: Mapping[str, Whole]) -> Stage:
    """Return the walk of a sweep that reduces the new values of states that are kept as a whole, and stores nothing."""
    sums = [(x, kind, tuple(f"{x}_{t}" for t in temps))
            for x in stage.stores if x in new for kind, temps in new[x].sums]  # fmt: skip
    return replace(
        stage,
        temps=tuple(t for _, _, temps in sums for t in temps),
        matrices=True,
        sums=tuple((kind, temps) for _, kind, temps in sums),
        reduces=tuple(x for x, _, _ in sums),
        absent=tuple(x for x in stage.reads if x not in stage.needs),
    )


def _walk(stage: Stage, sums: Mapping[str, str], touched: set[str]) -> Stage:
    """Return a sweep of the rule, over panels where it needs values of rows or columns."""
    by_rows = any(x in sums for x in stage.temps)

    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sums.get(x, x) for x in names)

    return replace(
        stage, temps=named(stage.temps), matrices=stage.matrices or by_rows or bool(touched),
        sums=tuple((kind, named(names)) for kind, names in stage.sums),
    )  # fmt: skip


def _total(rows: str, temp: Temp) -> Stage:
    """Return the work that reduces sums of rows to that of the tensor."""
    kind = "max" if temp.reduction.endswith("max") else "sum"
    return Stage(COPY, "row", temps=(temp.name,), matrices=True, reads=(rows,), sums=((kind, (temp.name,)),))


def _copies(new: Mapping[str, Whole]) -> Iterator[Stage]:
    """Yield the work that replaces the vectors of states."""
    for name, whole in new.items():
        for field, temp, space in whole.kept:
            yield Stage(COPY, space, matrices=True, reads=(f"{name}_{temp}",), stores=(f"{name}_{field}",))
