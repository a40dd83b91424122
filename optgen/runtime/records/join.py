"""A rule and a plan as records, each written once, and the `Variant` that the two make for a parameter.

A rule's records say what a step computes and which states it has, a plan's which codec keeps what.  Neither knows the
other; `variants` lists what they make of each parameter dtype, size class and setting of the flags.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

from optgen.runtime.records import EIGHT, WIDE, Eager, Field, Matrix, Rule, Stage, Temp, Variant, View, Whole, keys
from optgen.runtime.records.whole_states import divided

_BY_ROWS = {"row", "col", "mat", "call"}


@dataclass(frozen=True)
class StateRecord:
    """A state of a rule.

    nonneg         True if no value is negative
    space          "elem", or where there are few values; see Field
    init           the first value: a number, "param" for the weight, or the name of a hyper-parameter
    normalized_by  the state by whose root the rule divides it
    cancels        True if what is normalized by it is read in quotients alone (verify/lint.py)
    nearest        True if formats that may do either round it to nearest: it would climb, sink or wander otherwise
    rank           of a matrix of low rank: the hyper-parameter that says it, or a number
    trait          of a matrix: what formats in few bits may rely on, such as "symmetric"; "" keeps it in fp32; "input":
                   the user feeds it, in fp32
    """

    name: str
    nonneg: bool = False
    space: str = "elem"
    init: float | str = 0.0
    normalized_by: str = ""
    cancels: bool = False
    nearest: bool = False
    rank: str | int = ""
    trait: str = ""


@dataclass(frozen=True)
class RuleRecord:
    """The step of a rule under some settings of its flags.

    name          the rule
    states        those that exist under these flags, in the order of the signature
    unchanged     the states that this step gives back as it found them, then those of each other step of the same
                  parameter, for which flags that follow steps are set otherwise
    differs       what some other step makes in another way, "p" for the weight
    early         the states that later sweeps of the step may read as they are stored
    spaces        small spaces of the values that the step computes or keeps, and "call" for functions of matrices
    by_rows       True if it, or another step of the same parameter, works on rows and columns
    matrix        see Variant
    settings      what these settings are: a flag that is not in one may be either
    flags, suffix  one of them, and what the rule's name ends in under it; see `by_flags`
    """

    name: str
    states: tuple[StateRecord, ...] = ()
    host_states: tuple[tuple[str, float], ...] = ()
    unchanged: tuple[tuple[str, ...], ...] = ((),)
    differs: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    by_rows: bool = False
    matrix: Matrix = "last"
    settings: tuple[Mapping[str, bool], ...] = ({},)
    flags: Mapping[str, bool] = field(default_factory=dict, hash=False)
    suffix: str = ""


def by_flags(usual: Mapping[str, bool], *rules: RuleRecord) -> tuple[RuleRecord, ...]:
    """Return the record of each setting of the flags that there is one for; `usual`: the first setting."""
    found = []
    for changed in itertools.product((False, True), repeat=len(usual)):
        flags = {name: on != other for (name, on), other in zip(usual.items(), changed, strict=True)}
        words = [name if on else f"no_{name}" for name, on in flags.items() if on != usual[name]]
        fitting = (x for x in rules if any(setting.items() <= flags.items() for setting in x.settings))
        found += [replace(x, flags=flags, suffix="".join(f"_{word}" for word in words)) for x in fitting]
    return tuple(found)


@dataclass(frozen=True)
class FormatRecord:
    """The storage format of one kind of value under a plan.

    codec     its name in the plan's codec modules; "" for fp32 as it is
    fields    what is stored, named by suffixes; the dtype of the parameter aside
    noise     random bits that an element is rounded with; 0: to nearest
    relative  True if values are divided by the root of the second moment that the rule divides them by, if that is
              kept positive
    positive  True if no value is read back as 0
    unrounded  True if the codec gives the root before it is rounded, too
    matrix    whose rows and columns the fields are those of; None if there are none
    nearest   the codec where states ask for rounding to nearest; None if the format says how it rounds
    vector    the form for tensors without rows and columns; None if it is the same
    whole     the work for a state that is kept by numbers of rows and columns; None of others
    """

    codec: str = ""
    fields: tuple[Field, ...] = (Field("", "float32"),)
    noise: int = 0
    relative: bool = False
    positive: bool = False
    unrounded: bool = False
    matrix: Matrix | None = None
    nearest: str | None = None
    vector: FormatRecord | None = None
    whole: Whole | None = None


FP32 = FormatRecord()
NOTHING = FormatRecord(fields=())
"""The fields beside a weight in fp32: none."""

MATRICES = {
    "symmetric": FormatRecord(
        "symmetric",
        (
            Field("codes", "int8", part="lower"),
            Field("scale", "int16", part="lower scale"),
            Field("diagonal", "float32", part="diagonal"),
        ),
    ),
    "orthogonal": FormatRecord("orthogonal", (Field("codes", "int8"), Field("scale", "int16", part="scale"))),
}
NEAREST = MATRICES | {"triangular": replace(MATRICES["symmetric"], codec="triangular")}
"""Trait of a matrix state -> how plans of `matrices=8` that round to nearest keep it."""

MATRICES |= {
    "triangular": replace(NEAREST["triangular"], noise=24),
    "low_rank": replace(MATRICES["orthogonal"], codec="low_rank", noise=24, relative=True),
    "low_rank_nonneg": FormatRecord(
        "low_rank_nonneg",
        (Field("codes", "int8"), Field("ends", "int16", part="ends")),
        noise=24,
        positive=True,
    ),
}
"""The same of other plans; the codec is one of reference/matrix_codecs.py."""


@dataclass(frozen=True)
class PlanRecord:
    """A plan: which format keeps which kind of value; see `optgen.formats.Plan`.

    weights  parameter dtype -> what is stored beside the parameter; nothing where there is none
    views    further encodings of the weight
    matrices  bits of matrix states whose trait is in `MATRICES`, 8 or 32
    discouraged  True if the lint may find errors; beside each rule stands which, in a module of the plan's name
    """

    small_numel: int
    weights: Mapping[str, FormatRecord] = field(default_factory=dict)
    signed: FormatRecord = FP32
    nonneg: FormatRecord = FP32
    initial: FormatRecord = FP32
    small: FormatRecord = FP32
    matrices: int = 32
    overrides: Mapping[str, FormatRecord] = field(default_factory=dict)
    discouraged: bool = False
    views: tuple[View, ...] = ()

    def of(self, state: StateRecord, small: bool, vector: bool) -> FormatRecord:
        """Return the format of a state; small tensors are one class, vectors and matrices."""
        if state.trait == "input":
            return FP32
        found = self.overrides.get(state.name) or self._usual(state, small)
        if vector or small:
            found = found.vector or found
        if state.nearest and found.nearest is not None:
            return replace(found, codec=found.nearest, noise=0)
        return found

    def _usual(self, state: StateRecord, small: bool) -> FormatRecord:
        """Return the format of a state by what it is."""
        if state.space != "elem":
            nearest = self.signed != FP32 and not self.signed.noise and not self.nonneg.noise
            kept = NEAREST if nearest else MATRICES
            return kept.get(state.trait, FP32) if self.matrices == 8 and not small else FP32
        if state.init == "param":
            return self.initial
        return self.small if small else self.nonneg if state.nonneg else self.signed

    def formats(self, rule: RuleRecord, small: bool, vector: bool = False) -> dict[str, FormatRecord]:
        """Return the format of each state; without a positive second moment values are kept as they are."""
        found = {state.name: self.of(state, small, vector) for state in rule.states}
        base = {state.name: found.get(state.normalized_by) for state in rule.states}
        absolute = [x for x, fmt in found.items() if fmt.relative and not ((to := base[x]) and to.positive)]
        return found | {name: replace(found[name], relative=False) for name in absolute}


@dataclass(frozen=True, eq=False)
class Pair:
    """A rule under a plan.

    name         the plan's name
    variants     one for each parameter dtype, size class and setting of the flags
    small_numel  tensors with fewer elements take the variant for small tensors
    strict       the steps of the rule in strict maths
    eager        the modules of the rule's functions of whole matrices, of its tiles in strict maths, and of the plan's
                 codecs in strict maths, by name
    cpp          the files of the rule's C++ text and of the plan's
    triton       the modules of the rule's Triton kernels and of the plan's codecs, by name
    discouraged  state -> what the lint finds wrong with how the plan keeps it
    """

    name: str
    variants: tuple[Variant, ...]
    small_numel: int = 0
    strict: tuple[Rule, ...] = ()
    eager: tuple[str, ...] = ()
    cpp: tuple[Path, ...] = ()
    triton: tuple[str, ...] = ()
    discouraged: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The parameter dtypes that there are variants for."""
        return tuple(dict.fromkeys(v.param for v in self.variants))


def variants(rules: tuple[RuleRecord, ...], plan: PlanRecord) -> Iterator[Variant]:
    """Yield the variants of a rule under a plan: each setting of flags, parameter dtype and size class that differs."""
    for rule in rules:
        large, small = plan.formats(rule, False), plan.formats(rule, True)
        for param in ("float32", *plan.weights):
            yield joined(rule, plan, param, large)
            if plan.small_numel and rule.states and small != large:
                yield joined(rule, plan, param, small, small=True)
            if not rule.by_rows and any(fmt.matrix for fmt in large.values()):
                yield joined(rule, plan, param, plan.formats(rule, False, True), vector=True)


def with_steps(rules: tuple[RuleRecord, ...], steps: tuple[Rule, ...], plan: PlanRecord) -> Iterator[Variant]:
    """Yield the variants of a rule under a plan, each with the step of its flags."""
    return (with_step(v, steps) for v in variants(rules, plan))


def with_step(variant: Variant, steps: tuple[Rule, ...]) -> Variant:
    """Return a variant with the one of these steps that is of its flags.

    Of a step that reads new states back there are two, and the one that reads none back is taken where it may not.
    """
    flags, early = variant.flags.items(), set(variant.eager.early)
    fitting = [s for s in steps if any(setting.items() <= flags for setting in s.settings)]
    if not fitting:
        return variant
    step = next((s for s in fitting if set(s.early) == early), fitting[0])
    spaces = {f.state: "elem" if f.shared else f.space for f in variant.fields}
    rule, temps = completed(step, tuple(spaces.items()))
    bare = replace(variant, temps=temps, stages=(), rule=rule)
    return (divided(bare) if bare.eager.whole else bare).in_stages()


@lru_cache(maxsize=4096)
def completed(rule: Rule, spaces: tuple[tuple[str, str], ...]) -> tuple[Rule, tuple[Temp, ...]]:
    """Return a step with what follows from its stages, and its temps; `spaces`: (name, space) of each state."""
    of = {**dict(spaces), "p": "elem", **{x: space for space, names in rule.temps.items() for x in names}}
    for stage in rule.stages:
        of |= {x: stage.space for x in stage.stores if x not in of}
        of |= {x: x.partition("_")[0] for x in stage.summed if x not in of}
    temps: dict[str, Temp] = {}
    stages = []
    everything = tuple(range(rule.scalars)) if len(rule.stages) == 1 else ()
    for stage, level in zip(rule.stages, _levels_of(rule.stages, of), strict=True):
        left = {t.name: t for t in _left(stage, of) if t.name not in dict(spaces)}
        temps |= left
        touched = {of.get(x) for x in (*stage.reads, *stage.stores, *stage.summed)}
        by_rows = not stage.on_host and not touched.isdisjoint({"row", "col", "mat"})
        scalars = stage.scalars or everything
        stages.append(replace(stage, level=level, temps=tuple(left), scalars=scalars, matrices=by_rows))
    return replace(rule, stages=tuple(stages)), tuple(temps.values())


def _left(stage: Stage, spaces: Mapping[str, str]) -> list[Temp]:
    """Return what a stage stores or reduces to, as temps."""
    found = []
    for x in (x for x in stage.stores if x != "p"):
        t = Temp(x, "elem", wide=True) if spaces[x] == WIDE else Temp(x, spaces[x])
        of_model = stage.space == "tensor" and t.space == "model"
        found.append(replace(t, reduction="model_sum", source="tensor") if of_model else t)
    for kind, names in stage.sums:
        few = "max" if kind == "max" else "sum"
        found += [Temp(x, spaces[x], f"{spaces[x]}_{few}", stage.space) for x in names]
    return found


def _levels_of(stages: Sequence[Stage], spaces: Mapping[str, str]) -> list[int]:
    """Return the level of each stage, as in levels."""
    return levels((s.space, s.reads, (x for x in s.stores if spaces.get(x) == "model")) for s in stages)


def levels(stages: Iterable[tuple[str, Iterable[str], Iterable[str]]]) -> list[int]:
    """Return the level of each stage: a sweep or a function of matrices is one, and so is all small work between two
    of them, unless a sum over the model ends it.

    stages  (space, names that it reads, names of values of the model that it stores)
    """
    found, before, waiting = [-1], "elem", set[str]()
    for space, reads, of_model in stages:
        begins = not {before, space}.isdisjoint(("elem", "call", "whole")) or not waiting.isdisjoint(reads)
        found.append(found[-1] + begins)
        waiting = set() if begins else waiting
        if space == "tensor":
            waiting |= {*of_model}
        before = space
    return found[1:]


def joined(
    rule: RuleRecord,
    plan: PlanRecord,
    param: str,
    formats: Mapping[str, FormatRecord],
    small: bool = False,
    vector: bool = False,
) -> Variant:
    """Return the variant of a rule whose states are kept in these formats, without its step."""
    weight = plan.weights.get(param, NOTHING)
    few = {f.space for fmt in formats.values() for f in fmt.fields} - {"elem"}
    rows = rule.by_rows and _BY_ROWS.isdisjoint({*rule.spaces, *few})
    matrix = _matrix(rule, formats) if rows or few or rule.spaces else "last"
    fields = [replace(f, name=f"weight_{f.name}", state="p") for f in weight.fields]
    for state in rule.states:
        fields += _fields(state, formats[state.name], _matrix(rule, formats))
    return Variant(
        function=f"{rule.name}_{param}{rule.suffix}{'_small' * small}{'_vector' * vector}",
        param=param,
        fields=tuple(fields),
        small=small,
        vector=vector,
        flags=rule.flags,
        host_states=rule.host_states,
        init={s.name: s.init for s in rule.states if s.init != 0.0},
        rows=rows,
        matrix=matrix,
        eager=_stored(rule, weight, formats),
        views=_views(plan.views, fields),
    )


def _views(views: tuple[View, ...], fields: Iterable[Field]) -> tuple[View, ...]:
    """Return views in the storage blocks of these fields, or in blocks of their own where nothing is in blocks."""
    blocks = {f.per for f in fields if f.per not in (1, EIGHT)} or {view.size for view in views}
    return tuple(view if view.transposed else view.in_blocks(max(blocks)) for view in views)


def _matrix(rule: RuleRecord, formats: Mapping[str, FormatRecord]) -> Matrix:
    """Return whose rows and columns a variant works on: those of its rule, or else those of its formats."""
    of_formats = {fmt.matrix for fmt in formats.values()}
    return rule.matrix if rule.by_rows else next((x for x in ("last", "first") if x in of_formats), rule.matrix)


def _unrounded(rule: RuleRecord, formats: Mapping[str, FormatRecord]) -> frozenset[str]:
    return frozenset(s.name for s in rule.states if s.cancels and formats[s.name].unrounded)


def _stored(rule: RuleRecord, weight: FormatRecord, formats: Mapping[str, FormatRecord]) -> Eager:
    """Return how a rule's values are stored in these formats."""
    codecs = {"p": weight} | {s.name: formats[s.name] for s in rule.states if s.space == "elem"}
    matrices = _coded({name: fmt for name, fmt in formats.items() if name not in codecs})
    bases = {s.name: s.normalized_by for s in rule.states if formats[s.name].relative}
    relative = {name: base for name, base in bases.items() if name not in matrices}
    whole = {name: fmt.whole for name, fmt in formats.items() if fmt.whole is not None}
    still = settled(rule.unchanged[0], relative)
    noise, words = _noise(rule, weight, formats, relative, {*still, *matrices})
    return Eager(
        codecs=_coded(codecs),
        relative=relative,
        unrounded=_unrounded(rule, formats),
        noise=noise,
        words=words,
        early=_early(rule.early, relative, whole),
        still=still,
        whole=whole,
        matrices=matrices,
        over={name: bases[name] for name in matrices if name in bases},
        random=frozenset(name for name in matrices if formats[name].noise),
    )


def _coded(formats: Mapping[str, FormatRecord]) -> dict[str, str]:
    """Return the codecs of values that are not fp32."""
    return {name: fmt.codec for name, fmt in formats.items() if fmt.codec}


def _noise(
    rule: RuleRecord, weight: FormatRecord, formats: Mapping[str, FormatRecord], relative: Mapping[str, str],
    without: Collection[str],
) -> tuple[dict[str, tuple[int, int]], tuple[keys.Word, ...]]:  # fmt: skip
    """Return (word, shift) of the random bits of each value that draws some, and the recipes of the words."""
    order = sorted(formats, key=lambda name: name not in relative.values())  # what others are divided by comes first
    wants = {name: formats[name].noise for name in order if name not in without} | {"p": weight.noise}
    rare = {*rule.differs}.union(*(settled(names, relative) for names in rule.unchanged))
    dealt, words = keys.deal(wants, rare)
    return {name: (word, shift) for name, (word, shift, _) in dealt.items()}, words


def _early(states: tuple[str, ...], relative: Mapping[str, str], whole: Collection[str]) -> tuple[str, ...]:
    """Return the states that are read back within the step: all of these, or none where one changes with another, or
    with values of rows and columns."""
    return states if set(settled(states, relative)) == set(states) and not set(states) & set(whole) else ()


def settled(same: Collection[str], relative: Mapping[str, str]) -> tuple[str, ...]:
    """Return the states of `same` that stay: one that is kept relative to another stays only together with it."""
    found = set(same)
    while moved := {x for pair in relative.items() for x in pair if x in found and not found.issuperset(pair)}:
        found -= moved
    return tuple(sorted(found))


def _fields(state: StateRecord, fmt: FormatRecord, matrix: Matrix) -> Iterator[Field]:
    """Yield a state's fields under their keys."""
    for k, f in enumerate(fmt.fields):
        space = f.space if state.space == "elem" else state.space
        yield replace(
            f,
            name=f"{state.name}_{f.name}" if f.name else state.name,
            state=state.name,
            space=space,
            matrix=matrix if space != "elem" else "last",
            shared=space != state.space,
            nonneg=f.nonneg or (k == 0 and state.nonneg),
            rank=state.rank or 0,
        )
