"""The C++ kernel of a rule under a plan: a few lines that say how the plan keeps the rule's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optgen.runtime.records import EIGHT, MATRICES, Eager, Field, Rule, Stage, Temp, Variant
from optgen.runtime.records.keys import draw_salt

KERNEL = "kernel"
"""The name of the kernel in its text."""


def source(variant: Variant, rule: Rule, text: str, codecs: str) -> str:
    """Return the text of a step that is one sweep, from the texts of its rule and of its plan's codecs.

    The columns are p, g and the fields in their order, as a row of the table has them (optgen/runtime/cpu/cpp/sweep.h).
    """
    eager, (stage,) = variant.eager, rule.stages
    stores = [x for x in stage.stores if x not in eager.still]
    states = [x for x in dict.fromkeys((*stage.reads, *stage.stores)) if x not in ("p", "g")]
    dealt = [*(x for x in eager.noise if x != "p"), "p"]
    owners = ["p", "g", *(f.owner for f in variant.fields)]
    values = []
    for owner in ("p", *states):
        if owner in eager.draws:
            values.append(_drawn(owner, states.index(owner), variant.block))
            continue
        codec = _encoding(eager, owner, owner in stores)
        first = owners.index(owner)
        base = eager.relative.get(owner)
        given = [
            codec,
            str(states.index(owner) if owner != "p" else len(states)),
            str(0 if owner == "p" else first),
            "P" if owner == "p" else str(dealt.index(owner)) if owner in dealt else "P",
            str(-1 if base is None else states.index(base)),
            str(owner in stores).lower(),
            str(owner in variant.nonneg and owner not in stage.plus).lower(),
            str(2 if owner == "p" else first + 1),
        ]
        values.append(f"Value<{', '.join(given)}>")
    written = [True, False, *(f.owner in stores for f in variant.fields)]
    columns = [_column_of(variant, name)[:-1] for name in ("p", "g", *variant.names)]
    return "\n".join(
        [
            '#include "sweep.h"',
            "namespace {",
            f"constexpr int WIDEST = {variant.block};",
            codecs,
            text,
            f"static_assert({stage.kernel}::SCALARS == {len(stage.scalars)});",
            "template <class Grad> struct Layout {",
            f"    static constexpr int BLOCK = {variant.block}, SCALARS = {len(rule.scalars)};",
            f"    static constexpr int ORDER[] = {{{', '.join(map(str, (*stage.scalars, 0)))}}};",
            f"    static constexpr auto NOISE = dealt({{{', '.join(_wants(variant))}}});",
            "    static constexpr Column COLUMNS[] = {",
            *(f"        {x}, {str(y).lower()}}}," for x, y in zip(columns, written, strict=True)),
            "    };",
            "};",
            f"template <class Grad> using {KERNEL} = Sweep<Layout<Grad>, {stage.kernel}, Grad,",
            ",\n".join(f"    {value}" for value in values) + ">;",
            "}  // namespace",
            "OPTGEN_EXPORT",
            "",
        ]
    )


def _drawn(name: str, place: int, block: int) -> str:
    """Return the value that is a draw of random numbers of elements."""
    return f"Value<Drawn<{draw_salt(name)}, {block}>, {place}, 0, P, -1, false>"


def _encoding(eager: Eager, owner: str, written: bool) -> str:
    """Return the struct of a value's codec: one that stores it, or one that reads alone."""
    codec = eager.codecs.get(owner, "full")
    rounds = "stochastic" if owner in eager.noise else "nearest"
    return f"{codec}_{rounds if written or codec == 'full' else 'fields'}"


# -- steps of several stages (optgen/runtime/cpu/cpp/steps.h)

_KINDS = {
    "elem": "ELEMENT", "row": "ROW", "col": "COLUMN", "mat": "MATRIX", "tensor": "WHOLE", "model": "WHOLE",
    "axis": "AXIS", **dict.fromkeys(MATRICES, "WHOLE"),
}  # fmt: skip
_REDUCTIONS = {"": "NONE", "sum": "TOTAL", "max": "LARGEST"}
_EXTENTS = ("rows", "columns", "elements")


def steps_source(variant: Variant, rule: Rule, text: str, codecs: str) -> str:
    """Return the text of a step of several stages, from the texts of its rule and of its plan's codecs."""
    names = ["p", "g", *variant.names, *(t.name for t in variant.temps)]
    reduced = [t for t in variant.temps if t.source == "elem"]
    columns = [_column_of(variant, name) for name in names]
    columns += [f"{{4, {_KINDS[t.space]} + 8}}" for t in reduced]
    kernels = [(own, stage) for own, stage in zip(variant.stages, rule.stages, strict=True) if not stage.on_host]
    noise = ", ".join(_wants(variant))
    lines = ['#include "steps.h"', "namespace {", f"constexpr int WIDEST = {variant.block};", codecs, text]
    for k, (own, stage) in enumerate(kernels):
        lines += _Stage(variant, own, stage, names, reduced, noise).lines(k, text)
    return "\n".join(
        [
            *lines,
            f"template <class Grad> struct {KERNEL} {{",
            "    typedef void staged;",
            f"    static constexpr int SCALARS = {len(rule.scalars)}, BLOCK = {variant.block};",
            "    static constexpr StageColumn COLUMNS[] = {",
            *(f"        {column}," for column in columns),
            "    };",
            "    static constexpr Stage STAGES[] = {",
            *(f"        stage<stage_{k}<Grad>>()," for k in range(len(kernels))),
            "    };",
            "};",
            "}  // namespace",
            "OPTGEN_EXPORT",
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
        return f"{{{4 if variant.param == 'float32' else 2}, ELEMENT}}"
    if name == "g":
        return "{sizeof(typename Grad::stored), ELEMENT}"
    for f in variant.fields:
        if f.name == name:
            size = f.width if f.width > 1 or f.per == EIGHT else f.torch_dtype.itemsize
            return f"{{{size}, {_kind(f)}}}"
    temp = next(t for t in variant.temps if t.name == name)
    return f"{{{2 if temp.space == 'elem' and not temp.wide else 4}, {_KINDS[temp.space]}}}"


def _kind(field: Field) -> str:
    if field.width > 1 or field.per == EIGHT:
        return "EIGHTH"
    return "BLOCK_OF" if field.per > 1 else _KINDS[field.space]


class _Stage:
    """The text of one stage of a variant; `own` is its record in the blocks of the plan, `stage` that of the rule."""

    def __init__(
        self, variant: Variant, own: Stage, stage: Stage, names: Sequence[str], reduced: Sequence[Temp], noise: str
    ) -> None:
        self.variant, self.own, self.stage, self.names, self.noise = variant, own, stage, names, noise
        self.eager = variant.eager
        self.temps = {t.name: t for t in variant.temps}
        self.spaces = {f.name: f.space for f in variant.fields} | {t.name: t.space for t in variant.temps}
        self.partial = {t.name: len(names) + k for k, t in enumerate(reduced)}
        self.stores = set() if stage.reduces else {x for x in stage.stores if x not in self.eager.still}
        self.sums = {} if stage.reduces else {names[0]: names for _, names in stage.sums}
        for x, (_, temps) in zip(stage.reduces, stage.sums, strict=False):
            self.sums[x] = (*self.sums.get(x, ()), *temps)
        taken = dict.fromkeys((*stage.reads, *stage.stores, *(names[0] for _, names in self.walk().sums)))
        self.given = [x for x in taken if x not in ("p", "g")]
        owners = variant.owners_in(stage)
        self.bases = [x for x in owners if x not in taken]
        self.reads = {x for x in stage.reads if x not in stage.absent}
        self.reads |= {base for x, base in self.eager.relative.items() if x in owners}
        self.places: list[str] = []

    def walk(self) -> Stage:
        """The stage, or the sweep of which it is the first walk: its function has that one's sums, too."""
        assert self.variant.rule is not None
        alike = (s for s in self.variant.rule.stages if s.kernel == self.stage.kernel and not s.reduces)
        return next(alike) if self.stage.reduces else self.stage

    def lines(self, number: int, text: str) -> list[str]:
        """The layout, the rule's part and the alias `stage_<number>`; `text`: of the rule."""
        stage = self.stage
        weight = self.owned("p") if "p" in self.reads or "p" in self.stores else []
        flags = "p" in self.reads, "p" in self.stores
        for name in weight[:1]:
            self.place(name, *flags)
        gradient = len(self.places) if "g" in self.reads else -1
        if gradient >= 0:
            self.places.append("{1, -1, sizeof(typename Grad::stored), ELEMENT, true, false, NONE, 0}")
        more = len(self.places)
        for name in weight[1:]:
            self.place(name, *flags)
        values = [self.weight(more), *(self.value(k, x) for k, x in enumerate((*self.given, *self.bases)))]
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
            "};",
            *self.rule(number, len(order), text),
            f"template <class Grad> using stage_{number} = Staged<",
            f"    layout_{number}<Grad>, rule_{number}, {'Grad' if gradient >= 0 else 'no_gradient'},",
            ",\n".join(f"    {value}" for value in values) + ">;",
        ]

    def rule(self, number: int, count: int, text: str) -> list[str]:
        """The struct that keeps a stage's scalars and calls the rule's function, or that of a state's codec."""
        kernel = self.stage.kernel
        if f"\nstruct {kernel} {{" in text:
            return [f"using rule_{number} = {kernel};"]  # of a rule of one sweep
        if self.stage.state:
            kernel = f"{self.eager.codecs[self.stage.state]}_fields::{kernel}"
        scalars, values = [f"s{k}" for k in range(count)], [f"a{k}" for k in range(len(self.given))]
        kinds = [f"A{k}" for k in range(len(self.given) + len(self.bases))]
        given = [*(x for x in ("p", "g") if x in self.stage.reads), *scalars, *values]
        call = f"{kernel}({', '.join(given)});"
        taken = ["F p", "F g", *(f"{kind} &{name}" for kind, name in zip(kinds, values, strict=False))]
        taken += [f"{kind} &" for kind in kinds[len(values) :]]
        return [
            f"struct rule_{number} : StageRule {{",
            f"    static constexpr int SCALARS = {count};",
            *([f"    const F {', '.join(scalars)};"] if scalars else []),
            f"    explicit rule_{number}(const float *scalars)"
            + (" : " if scalars else "")
            + ", ".join(f"{x}(scalars[{k}])" for k, x in enumerate(scalars))
            + " {}",
            *([f"    template <{', '.join(f'class {x}' for x in kinds)}>"] if kinds else []),
            f"    F step({', '.join(taken)}) const {{",
            *([f"        return {call}"] if "p" in self.stage.stores else [f"        {call}", "        return p;"]),
            "    }",
            "};",
        ]

    def owned(self, owner: str) -> list[str]:
        """The columns that keep a value: itself, its fields, or what its codec reads."""
        if owner in self.eager.whole:
            return [_suffixed(owner, x) for x in self.eager.whole[owner].decode]
        if owner in self.temps:
            return [owner]
        return [*(["p"] if owner == "p" else []), *(f.name for f in self.variant.fields if owner in (f.owner, f.name))]

    def place(
        self, name: str, read: bool, written: bool, partial: int = -1, reduction: str = "NONE", source: int = -1
    ) -> None:
        """Add the place of a column; `source`: that whose array a reduced value shares, itself where it is negative."""
        size = _column_of(self.variant, name)[1:-1]
        flags = f"{str(read).lower()}, {str(written).lower()}"
        source = len(self.places) if source < 0 else source
        self.places.append(f"{{{self.names.index(name)}, {partial}, {size}, {flags}, {reduction}, {source}}}")

    def reduced(self, name: str, source: int) -> None:
        """Add the place of a temp that is reduced from the array of the place `source`."""
        partial = self.partial.get(name, -1) if self.stage.space == "elem" else -1
        self.place(name, False, True, partial, _REDUCTIONS[self.temps[name].reduction.partition("_")[2]], source)

    def weight(self, more: int) -> str:
        number = len(self.given) + len(self.bases)
        if "p" not in self.reads and "p" not in self.stores:
            return f"Value<untouched, {number}, 0, P, -1, false>"
        codec = _encoding(self.eager, "p", "p" in self.stores)
        return f"Value<{codec}, {number}, 0, P, -1, {str('p' in self.stores).lower()}, false, {more}>"

    def value(self, number: int, x: str) -> str:
        """The value of a state, of one of its fields, or of a temp; its places."""
        eager, at = self.eager, len(self.places)
        if x in eager.draws:
            return _drawn(x, number, self.own.block)
        written = x in self.stores or x in self.sums
        dealt = [name for name in eager.noise if name != "p"]
        drawn = str(dealt.index(x)) if x in dealt else "P"
        if x not in self.reads and not written:
            return f"Value<untouched, {number}, 0, P, -1, false>"
        codec, base, plus = self.codec(x), "-1", False
        for name in self.owned(x) if x in self.reads or x in self.stores else ():
            vector = x in eager.whole and self.spaces[name] != "elem"
            self.place(name, vector or x in self.reads, x in self.stores and not vector)
        if x in eager.whole:
            for name in eager.whole[x].encode if x in self.stores else ():
                self.place(_suffixed(x, name), True, False)
        elif x in eager.codecs:
            plus = x in self.variant.nonneg and x not in self.stage.plus
        source = len(self.places)
        for name in self.sums.get(x, ()):
            self.reduced(name, source)
        if x in eager.relative:
            base = str([*self.given, *self.bases].index(eager.relative[x]))
        flags = f"{str(written).lower()}, {str(plus).lower()}"
        return f"Value<{codec}, {number}, {at}, {drawn}, {base}, {flags}>"

    def codec(self, x: str) -> str:
        """The codec of a value."""
        if x in self.stage.reduces:
            return f"reduced<{_encoding(self.eager, x, False) if x in self.reads else 'untouched'}>"
        if x in self.eager.codecs:
            return _encoding(self.eager, x, x in self.stores)
        space = self.spaces[x]
        if x in self.sums or (_KINDS[space] == _KINDS[self.stage.space] and space != "elem"):
            return "full_nearest"
        if space in ("row", "mat"):
            return "of_rows"
        if space in ("tensor", "model"):
            return "of_tensor"
        return "upper_half" if x in self.temps and space == "elem" and not self.temps[x].wide else "full_nearest"


def _suffixed(state: str, name: str) -> str:
    return f"{state}_{name}" if name else state
