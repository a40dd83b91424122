"""The C++ kernel of a rule under a plan: a few lines that say how the plan keeps the rule's values."""

from __future__ import annotations

from optgen.runtime.records import EIGHT, Field, Rule, Variant

KERNEL = "kernel"
"""The name of the kernel in its text."""


def source(variant: Variant, rule: Rule, text: str, codecs: str) -> str:
    """Return the text of a step that is one sweep, from the texts of its rule and of its plan's codecs.

    The columns are p, g and the fields in their order, as a row of the table has them (optgen/runtime/cpu/cpp/sweep.h).
    """
    eager, (stage,) = variant.eager, rule.stages
    assert eager is not None
    stores = [x for x in stage.stores if x not in eager.still]
    states = [x for x in dict.fromkeys((*stage.reads, *stage.stores)) if x not in ("p", "g")]
    dealt = [*(x for x in eager.noise if x != "p"), "p"]
    names = ["p", "g", *variant.names]
    values = []
    for owner in ("p", *states):
        codec = eager.codecs.get(owner, "full")
        codec += "_stochastic" if owner in eager.noise else "_nearest"
        first = next(k for k, name in enumerate(names) if name == owner or _owner(variant, name) == owner)
        base = eager.relative.get(owner)
        given = [
            codec,
            str(states.index(owner) if owner != "p" else len(states)),
            str(0 if owner == "p" else first),
            "P" if owner == "p" else str(dealt.index(owner)) if owner in dealt else "P",
            str(-1 if base is None else states.index(base)),
            str(owner in stores).lower(),
            str(owner in variant.nonneg and owner not in stage.plus).lower(),
        ]
        values.append(f"Value<{', '.join(given)}>")
    rare = {x: eager.words[eager.noise[x][0]][2] for x in eager.noise}
    wants = [f"{{{_codec(eager.codecs, x)}::NOISE, {str(rare.get(x, False)).lower()}}}" for x in dealt]
    wants = [want if x in eager.noise else "{0, false}" for x, want in zip(dealt, wants, strict=True)]
    columns = [_weight(variant), "{sizeof(typename Grad::stored), ELEMENT, false}"]
    columns += [_column(f, f.owner in stores) for f in variant.fields]
    return "\n".join(
        [
            '#include "sweep.h"',
            "namespace {",
            codecs,
            text,
            "template <class Grad> struct Layout {",
            f"    static constexpr int BLOCK = {variant.block}, SCALARS = {len(rule.scalars)};",
            f"    static constexpr int ORDER[] = {{{', '.join(map(str, (*stage.scalars, 0)))}}};",
            f"    static constexpr auto NOISE = dealt({{{', '.join(wants)}}});",
            "    static constexpr Column COLUMNS[] = {",
            *(f"        {column}," for column in columns),
            "    };",
            "};",
            f"template <class Grad> using {KERNEL} = Sweep<Layout<Grad>, {stage.kernel}, Grad,",
            ",\n".join(f"    {value}" for value in values) + ">;",
            "}  // namespace",
            "OPTGEN_EXPORT",
            "",
        ]
    )


def _owner(variant: Variant, name: str) -> str:
    return next((f.owner for f in variant.fields if f.name == name), "")


def _codec(codecs: object, owner: str) -> str:
    assert isinstance(codecs, dict)
    return f"{codecs.get(owner, 'full')}_stochastic"


def _weight(variant: Variant) -> str:
    return f"{{{4 if variant.param == 'float32' else 2}, ELEMENT, true}}"


def _column(field: Field, written: bool) -> str:
    if field.width > 1 or field.per == EIGHT:
        return f"{{{field.width}, EIGHTH, {str(written).lower()}}}"
    kind = "BLOCK_OF" if field.per > 1 else "ELEMENT"
    return f"{{{field.torch_dtype.itemsize}, {kind}, {str(written).lower()}}}"
