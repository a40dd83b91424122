"""The C++ kernel of a rule under a plan: a few lines that say how the plan keeps the rule's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from optgen.runtime.records import EIGHT, MATRICES, Eager, Field, Rule, Stage, Variant, dtype_of

KERNEL = "kernel"
"""The name of the kernel in its text."""


def source(variant: Variant, rule: Rule, text: str, codecs: str) -> str:
    """Return the text of a step that is one sweep, from the texts of its rule and of its plan's codecs.

    The columns are p, g and the fields in their order, as a row of the table has them (optgen/runtime/cpu/cpp/sweep.h).
    """
    (stage,) = rule.stages
    stores = variant.stored_by(stage)
    states = [x for x in dict.fromkeys((*stage.reads, *stage.stores)) if x not in ("p", "g")]
    values = [_value(variant, stage, owner, states, owner in stores) for owner in ("p", *states)]
    written = [True, False, *(f.owner in stores for f in variant.fields), *(f.space == "elem" for f in variant.shown)]
    columns = [_column_of(variant, name)[:-1] for name in variant.columns]
    return "\n".join(
        [
            '#include "sweep.h"',
            "namespace {",
            f"constexpr int WIDEST = {variant.block};",
            codecs,
            text,
            f"static_assert({stage.kernel}::SCALARS == {len(stage.scalars)});",
            "template <class Grad> struct Layout {",
            f"    static constexpr int BLOCK = {variant.block}, SCALARS = {rule.scalars};",
            f"    static constexpr int ORDER[] = {{{', '.join(map(str, (*stage.scalars, 0)))}}};",
            f"    static constexpr auto NOISE = dealt({{{', '.join(_wants(variant))}}});",
            "    static constexpr Column COLUMNS[] = {",
            *(f"        {x}, {str(y).lower()}}}," for x, y in zip(columns, written, strict=True)),
            "    };",
            *_views(variant, [variant.columns.index(view.fields[0].name) for view in variant.swept]),
            "};",
            f"template <class Grad> using {KERNEL} = Sweep<Layout<Grad>, {stage.kernel}, Grad,",
            ",\n".join(f"    {value}" for value in values) + ">;",
            "}  // namespace",
            *_export(variant),
            "",
        ]
    )


def _export(variant: Variant) -> list[str]:
    """Return the lines that export a kernel, with a view along columns if there is one."""
    for view in (x for x in variant.views if x.transposed):
        numel = len(variant.columns) + (len(variant.reduced) + 4 if variant.stages else 0)
        places = variant.columns.index(view.fields[0].name), numel, numel + (9 if variant.stages else 6)
        given = sum(not s.on_host for s in variant.stages), f"{view.name}_nearest", view.size, variant.param, *places
        return ['#include "columns.h"', f"OPTGEN_EXPORT_COLUMNS({', '.join(map(str, given))})"]
    return ["OPTGEN_EXPORT"]


def _value(variant: Variant, stage: Stage, owner: str, states: Sequence[str], stored: bool) -> str:
    """Return a value of a step that is one sweep: its codec, places, random bits, base, and what is done to it."""
    eager = variant.eager
    codec = _encoding(eager, owner, stored)
    if owner == "p":
        return f"Value<{codec}, {len(states)}, 0, P, -1, {str(stored).lower()}, false, 2>"
    place = ["p", "g", *(f.owner for f in variant.fields)].index(owner)
    base = states.index(eager.relative[owner]) if owner in eager.relative else -1
    flags = f"{str(stored).lower()}, {str(_may_be_negative_zero(variant, stage, owner)).lower()}"
    return f"Value<{codec}, {states.index(owner)}, {place}, {_bits(eager, owner)}, {base}, {flags}, {place + 1}>"


def _views(variant: Variant, places: Sequence[int]) -> list[str]:
    """Return the lines of a layout that name the views that it stores; `places`: of the first tensor of each."""
    found = []
    for view, at in zip(variant.swept, places, strict=False):
        scale = at + len(view.fields) - 1 if view.scaled else -1
        found.append(f"View<{view.name}_nearest, {view.size}, {at}, {variant.param}, {scale}>")
    return [f"    typedef Views<{', '.join(found)}> views;", "    typedef void shows;"] if found and places else []


def _bits(eager: Eager, owner: str) -> str:
    """Return which random bits a value takes: their number among those of states, or "P"."""
    dealt = [x for x in eager.noise if x != "p"]
    return str(dealt.index(owner)) if owner in dealt else "P"


def _may_be_negative_zero(variant: Variant, stage: Stage, owner: str) -> bool:
    """Return True for a nonnegative state whose zeros have to be made +0 before they are stored."""
    return owner in variant.nonneg and (owner not in stage.stores or owner in stage.zeros)


def _encoding(eager: Eager, owner: str, written: bool) -> str:
    """Return the struct of a value's codec: one that stores it, or one that reads alone."""
    codec = eager.codecs.get(owner, "full")
    rounds = "stochastic" if owner in eager.noise else "nearest"
    struct = f"{codec}_{rounds if written or codec == 'full' else 'fields'}"
    return f"unrounded<{struct}>" if written and owner in eager.unrounded else struct


# -- steps of several stages (optgen/runtime/cpu/cpp/steps.h)

_KINDS = {
    "elem": "ELEMENT", "row": "ROW", "col": "COLUMN", "mat": "MATRIX", "tensor": "WHOLE", "model": "WHOLE",
    "transposed": "WHOLE",
    **dict.fromkeys(MATRICES, "WHOLE"),
}  # fmt: skip
_REDUCTIONS = {"": "NONE", "sum": "TOTAL", "max": "LARGEST"}
_EXTENTS = ("rows", "columns", "elements")


def steps_source(variant: Variant, rule: Rule, text: str, codecs: str) -> str:
    """Return the text of a step of several stages, from the texts of its rule and of its plan's codecs."""
    kernels = [(own, stage) for own, stage in zip(variant.stages, rule.stages, strict=True) if not stage.on_host]
    noise = ", ".join(_wants(variant))
    lines = ['#include "steps.h"', "namespace {", f"constexpr int WIDEST = {variant.block};", codecs, text]
    for k, (own, stage) in enumerate(kernels):
        lines += _Stage(variant, own, stage, noise).lines(k, text)
    return "\n".join(
        [
            *lines,
            f"template <class Grad> struct {KERNEL} {{",
            "    typedef void staged;",
            f"    static constexpr int SCALARS = {rule.scalars}, BLOCK = {variant.block};",
            f"    static constexpr int ADDRESSES = {len(variant.columns) + len(variant.reduced)};",
            "    static constexpr Stage STAGES[] = {",
            *(f"        stage<stage_{k}<Grad>>()," for k in range(len(kernels))),
            "    };",
            "};",
            "}  // namespace",
            *_export(variant),
            "",
        ]
    )


def _wants(variant: Variant) -> Iterator[str]:
    """Yield the random bits of each value that draws some, last of the weight."""
    eager = variant.eager
    for owner in (*(x for x in eager.noise if x != "p"), "p"):
        rare = owner in eager.noise and eager.words[eager.noise[owner][0]][2]
        bits = f"{eager.codecs.get(owner, 'full')}_stochastic::NOISE" if owner in eager.noise else "0"
        yield f"{{{bits}, {str(rare).lower()}}}"


def _column_of(variant: Variant, name: str) -> str:
    """Return the bytes of an entry of a table's column, and of what it is one."""
    if name == "p":
        return f"{{{dtype_of(variant.param).itemsize}, ELEMENT}}"
    if name == "g":
        return "{sizeof(typename Grad::stored), ELEMENT}"
    if f := variant.stored.get(name):
        size = f.width if f.width > 1 or f.per == EIGHT else f.torch_dtype.itemsize
        return f"{{{size}, {_kind(f)}}}"
    temp = next(t for t in variant.temps if t.name == name)
    return f"{{{2 if temp.space == 'elem' and not temp.wide else 4}, {_KINDS[temp.space]}}}"


def _kind(field: Field) -> str:
    if field.width > 1 or field.per == EIGHT:
        return "EIGHTH"
    return "BLOCK_OF" if field.per > 1 and field.space == "elem" else _KINDS[field.space]


class _Stage:
    """The text of one stage of a variant; `own` is its record in the blocks of the plan, `stage` that of the rule."""

    def __init__(self, variant: Variant, own: Stage, stage: Stage, noise: str) -> None:
        self.variant, self.own, self.stage, self.noise = variant, own, stage, noise
        self.eager = variant.eager
        self.temps = {t.name: t for t in variant.temps}
        self.partial = {t.name: len(variant.columns) + k for k, t in enumerate(variant.reduced)}
        self.stores = set(variant.stored_by(stage))
        taken = dict.fromkeys((*stage.reads, *stage.stores, *(names[0] for _, names in self.walk().sums)))
        self.given = [x for x in taken if x not in ("p", "g")]
        self.bases = [x for x in variant.owners_in(stage) if x not in taken]
        self.places: list[str] = []

    @cached_property
    def sums(self) -> dict[str, tuple[str, ...]]:
        """Value whose array is summed -> the temps that it is reduced to: the first of these, or what is reduced."""
        if not self.stage.reduces:
            return {names[0]: names for _, names in self.stage.sums}
        out: dict[str, tuple[str, ...]] = {}
        for x, (_, temps) in zip(self.stage.reduces, self.stage.sums, strict=True):
            out[x] = (*out.get(x, ()), *temps)
        return out

    @cached_property
    def reads(self) -> set[str]:
        """The values that the stage reads, those that others are divided by among them."""
        owners = self.variant.owners_in(self.stage)
        bases = {base for x, base in self.eager.relative.items() if x in owners}
        return bases.union(x for x in self.stage.reads if x not in self.stage.absent)

    def walk(self) -> Stage:
        """The stage, or the sweep of which it is the first walk: its function has that one's sums, too."""
        assert self.variant.rule is not None
        alike = (s for s in self.variant.rule.stages if s.kernel == self.stage.kernel and not s.reduces)
        return next(alike) if self.stage.reduces else self.stage

    def lines(self, number: int, text: str) -> list[str]:
        """The layout, the rule's part and the alias `stage_<number>`; `text`: of the rule."""
        stage = self.stage
        weight = self.variant.read_from("p") if "p" in self.reads or "p" in self.stores else []
        flags = "p" in self.reads, "p" in self.stores
        for name in weight[:1]:
            self.place(name, *flags)
        gradient = len(self.places) if "g" in self.reads else -1
        if gradient >= 0:
            self.places.append("{1, -1, sizeof(typename Grad::stored), ELEMENT, true, false, NONE}")
        more = len(self.places)
        for name in weight[1:]:
            self.place(name, *flags)
        values = [self.weight(more), *(self.value(k, x) for k, x in enumerate((*self.given, *self.bases)))]
        views = _views(self.variant, self.view_places())
        order = [*stage.scalars, *(-1 - _EXTENTS.index(x) for x in stage.extents)]
        places = ", ".join(map(str, (*order, 0)))
        block = self.own.block if stage.space == "elem" else 1
        return [
            f"template <class Grad> struct layout_{number} {{",
            "    typedef void staged;",
            f"    static constexpr int BLOCK = {block}, G = {gradient}, ORDER[] = {{{places}}};",
            f"    static constexpr auto NOISE = dealt({{{self.noise}}});",
            f"    static constexpr Kind SPACE = {_KINDS[stage.space]};",
            f"    static constexpr bool MATRICES = {str(stage.matrices).lower()};",
            f"    static constexpr Columns<Place, {len(self.places)}> PLACES = {{{{",
            *(f"        {place}," for place in self.places),
            "    }};",
            "    static constexpr auto COLUMNS = columns_of(PLACES);",
            *views,
            "};",
            *self.rule(number, len(order), text),
            f"template <class Grad> using stage_{number} = Staged<",
            f"    layout_{number}<Grad>, rule_{number}, {'Grad' if gradient >= 0 else 'no_gradient'},",
            ",\n".join(f"    {value}" for value in values) + ">;",
        ]

    def rule(self, number: int, count: int, text: str) -> list[str]:
        """The struct that keeps a stage's scalars and calls the rule's function, or that of a state's codec."""
        kernel, stage = self.stage.kernel, self.stage
        if f"\nstruct {kernel} {{" in text:
            return [f"using rule_{number} = {kernel};"]  # of a rule of one sweep
        if stage.state:
            kernel = f"{self.eager.codecs[stage.state]}_fields::{kernel}"
        scalars, values = [f"s{k}" for k in range(count)], [f"a{k}" for k in range(len(self.given))]
        kinds = [f"A{k}" for k in range(len(self.given) + len(self.bases))]
        call = f"{kernel}({', '.join([*(x for x in ('p', 'g') if x in stage.reads), *scalars, *values])});"
        taken = ["F p", "F g", *(f"{kind} &{name}" for kind, name in zip(kinds, values, strict=False))]
        taken += [f"{kind} &" for kind in kinds[len(values) :]]
        return [
            f"struct rule_{number} : StageRule {{",
            f"    static constexpr int SCALARS = {count};",
            *_constructor(number, scalars),
            *([f"    template <{', '.join(f'class {x}' for x in kinds)}>"] if kinds else []),
            f"    F step({', '.join(taken)}) const {{",
            *([f"        return {call}"] if "p" in stage.stores else [f"        {call}", "        return p;"]),
            "    }",
            "};",
        ]

    def view_places(self) -> list[int]:
        """Add the places of the weight's views, if the stage stores it; return the first of each."""
        found = []
        for view in self.variant.swept if "p" in self.stores else ():
            found.append(len(self.places))
            for f in view.fields:
                self.place(f.name, f.space == "tensor", f.space == "elem")
        return found

    def place(self, name: str, read: bool, written: bool, partial: int = -1, reduction: str = "NONE") -> None:
        """Add the place of a column."""
        size = _column_of(self.variant, name)[1:-1]
        flags = f"{str(read).lower()}, {str(written).lower()}"
        self.places.append(f"{{{self.variant.columns.index(name)}, {partial}, {size}, {flags}, {reduction}}}")

    def hands_on(self, name: str) -> str:
        """Return how a tile hands on what is reduced to a temp (steps.h)."""
        temp = self.temps[name]
        if self.stage.space != "elem" or temp.space == "row":
            return "in_array"
        op = _REDUCTIONS[temp.reduction.partition("_")[2]]
        return f"in_total<{op}, {str(not self.stage.matrices).lower()}>"

    def weight(self, more: int) -> str:
        number = len(self.given) + len(self.bases)
        if "p" not in self.reads and "p" not in self.stores:
            return f"Value<untouched, {number}, 0, P, -1, false>"
        codec = _encoding(self.eager, "p", "p" in self.stores)
        return f"Value<{codec}, {number}, 0, P, -1, {str('p' in self.stores).lower()}, false, {more}>"

    def value(self, number: int, x: str) -> str:
        """The value of a state, of one of its fields, or of a temp; its places."""
        eager, at = self.eager, len(self.places)
        written = x in self.stores or x in self.sums
        if x not in self.reads and not written:
            return f"Value<untouched, {number}, 0, P, -1, false>"
        codec = self.codec(x)
        self.add_places(x)
        plus = x in eager.codecs and x not in eager.whole and _may_be_negative_zero(self.variant, self.stage, x)
        base = [*self.given, *self.bases].index(eager.relative[x]) if x in eager.relative else -1
        flags = f"{str(written).lower()}, {str(plus).lower()}"
        return f"Value<{codec}, {number}, {at}, {_bits(eager, x)}, {base}, {flags}>"

    def add_places(self, x: str) -> None:
        """Add the places of what a value is kept in, encoded with and reduced to."""
        whole = self.eager.whole.get(x)
        for name in self.variant.read_from(x) if x in self.reads or x in self.stores else ():
            vector = whole is not None and self.variant.spaces[name] != "elem"
            self.place(name, vector or x in self.reads, x in self.stores and not vector)
        for name in whole.encode if whole is not None and x in self.stores else ():
            self.place(f"{x}_{name}", True, False)
        for name in self.sums.get(x, ()):
            partial = self.partial.get(name, -1) if self.stage.space == "elem" else -1
            self.place(name, False, True, partial, _REDUCTIONS[self.temps[name].reduction.partition("_")[2]])

    def codec(self, x: str) -> str:
        """The codec of a value."""
        if x in self.sums:
            old = _encoding(self.eager, x, False) if x in self.stage.reduces and x in self.reads else "untouched"
            return f"reduced<{', '.join([old, *map(self.hands_on, self.sums[x])])}>"
        if x in self.eager.codecs:
            return _encoding(self.eager, x, x in self.stores)
        space = self.variant.spaces[x]
        if x in self.sums or (_KINDS[space] == _KINDS[self.stage.space] and space != "elem"):
            return "full_nearest"
        if space in ("row", "mat"):
            return "of_rows"
        if space in ("tensor", "model"):
            return "of_tensor"
        return "upper_half" if x in self.temps and space == "elem" and not self.temps[x].wide else "full_nearest"


def _constructor(number: int, scalars: Sequence[str]) -> list[str]:
    """Return the members of a struct that are scalars, and its constructor, as lines of text."""
    head = f"    explicit rule_{number}(const float *scalars)"
    if not scalars:
        return [f"{head} {{}}"]
    members = ", ".join(f"{x}(scalars[{k}])" for k, x in enumerate(scalars))
    return [f"    const F {', '.join(scalars)};", f"{head} : {members} {{}}"]
