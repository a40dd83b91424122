"""Divide a rule's step where a plan keeps states as a whole, by numbers of rows and columns.

No tile of such a state can be encoded before all of its new value was seen: the sweep that stores it is walked twice.
Its first walk stores nothing and reduces the new value by rows and columns, small work makes the new vectors of them,
and the second walk encodes under these.  The vectors that reading needs are replaced behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from optgen.runtime.records import COPY, Rule, Stage, Temp, Variant, Whole


def divided(rule: Rule, variant: Variant) -> Rule:
    """Return the stages of a rule for a variant, with those that its states need that are kept as a whole."""
    kept = variant.eager.whole
    if not kept:
        return rule
    sums, temps = _by_rows(rule)
    stages: list[Stage] = []

    def add(some: Iterator[Stage]) -> None:
        level = stages[-1].level + 1 if stages else -1
        stages.extend(replace(s, level=level) for s in some)

    read = {x for s in rule.stages if s.space == "elem" for x in variant.owners_in(s)}
    needed = {name: whole for name, whole in kept.items() if name in read}
    add(s.renamed(f"{name}_{{}}".format, name) for name, whole in needed.items() for s in whole.before)
    for _, level in groupby(rule.stages, key=lambda s: s.level):
        own = list(level)
        made = {x: kept[x] for s in own for x in s.stores if x in kept and x not in variant.eager.still}
        add(_first_walk(s, made) for s in own if s.space == "elem" and not made.keys().isdisjoint(s.stores))
        add(s.renamed(f"{name}_{{}}".format, name) for name, whole in made.items() for s in whole.between)
        add(_walk(s, sums, kept.keys() & set(variant.owners_in(s))) if s.space == "elem" else s for s in own)
        add(Stage(COPY, "row", 0, (), temps=(x,), matrices=True, reads=(sums[x],),
                  sums=(("max" if temps[x].reduction.endswith("max") else "sum", (x,)),))
            for s in own for x in s.temps if x in sums and s.space == "elem")  # fmt: skip
        add(_copies(made))
    of_states = [replace(t, name=f"{name}_{t.name}") for name, whole in needed.items() for t in whole.temps]
    summed = {x for s in stages for x in s.temps}  # a state that stays is not reduced
    of_states = [t for t in of_states if t.source != "elem" or t.name in summed]
    return replace(rule, temps=(*temps.values(), *of_states), stages=tuple(stages))


def _by_rows(rule: Rule) -> tuple[dict[str, str], dict[str, Temp]]:
    """Return what a sweep sums over the tensor with the sums of rows that it goes by, and all temps of the rule then.

    Panels have sums of rows and columns only.
    """
    sums: dict[str, str] = {}
    temps: dict[str, Temp] = {}
    for t in rule.temps:
        if t.space == "tensor" and t.source == "elem":
            sums[t.name] = f"{t.name}_rows"
            temps[sums[t.name]] = Temp(sums[t.name], "row", t.reduction.replace("tensor", "row"), "elem")
            t = replace(t, source="row")
        temps[t.name] = t
    return sums, temps


def _first_walk(stage: Stage, made: Mapping[str, Whole]) -> Stage:
    """Return the walk of a sweep that reduces the new values of states that are kept as a whole, and stores nothing."""
    needs = dict(stage.needs)
    states = [x for x in stage.stores if x in made]
    sums = [(x, kind, tuple(f"{x}_{t}" for t in temps)) for x in states for kind, temps in made[x].sums]
    return replace(
        stage,
        temps=tuple(t for _, _, temps in sums for t in temps),
        matrices=True,
        sums=tuple((kind, temps) for _, kind, temps in sums),
        reduces=tuple(x for x, _, _ in sums),
        absent=tuple(x for x in stage.reads if all(x not in needs[state] for state in states)),
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


def _copies(made: Mapping[str, Whole]) -> Iterator[Stage]:
    """Yield the work that replaces the vectors of states."""
    for name, whole in made.items():
        for field, temp, space in whole.kept:
            one = f"{name}_{field}"
            yield Stage(COPY, space, 0, (), matrices=True, reads=(f"{name}_{temp}",), stores=(one,), picked=(one,))
