"""The effects of a plan on a rule's states over many steps, decided before anything runs.

A format is judged by what happens when a state is decoded, updated and encoded again at every step, not by the
error of storing it once.  The recurrence of each state (an average, a sum, a maximum ...) is derived from the
spec; the rest from the format.

L1  a signed average, to nearest: no code may be stuck, that is, keep itself under decay alone
L2  a nonnegative average (or decaying maximum), to nearest: a cell is at most half of what a step can change,
    (1 - decay) / 2
L3  a signed state must have an exact 0
L5  a scale (or a float) must follow the whole range of fp32, or saturate
L6  a scale that is itself rounded to nearest, and not what the encoder divides by, is a second average that sticks
L7  statistics of a whole tensor cost a second pass over memory
L8  an ever-growing sum, to nearest, stops at the first value whose half cell exceeds a step
L9  a running maximum without decay, stochastically, climbs, a minimum sinks: what is rounded away is never taken
    back; to nearest, in codes that count in units of a scale, it follows the scale of its block; a constant that
    is stored again, with what it is kept relative to, wanders stochastically
L10 what is only ever multiplied stays 0 once it is 0
L11 a narrow weight, to nearest, loses updates below half of its last place
L14 means of rows and columns keep no element's maximum or minimum
L15 what grows with the step becomes an infinity, or NaN, late in training
L16 a rule of rows and columns without a branch for vectors refuses every model with a bias
L17 a signed sum, stochastically, adds up the noise of its stores, and so do weights that are made of it
L18 a polar factor lifts small singular values to 1, and with them the noise of codes of few bits
L19 a step by the sign of a state has the noise of its codes at full size where the state is small
L20 weights to evaluate with have the noise of the state that they are made of
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul, sub
from typing import Any

from optgen.base.errors import UserError
from optgen.formats.format import Format, FormatFinding, Severity, wide_reductions
from optgen.formats.of_matrices import OfMatrix
from optgen.formats.plan import Plan, Storage
from optgen.ir.node import loads, postorder, unseen
from optgen.lang import probe
from optgen.lang.declare import StateDecl
from optgen.lang.spec import Recurrence, Spec
from optgen.lower import needs_matrix, untouched
from optgen.ops import dtypes, spaces
from optgen.verify import bounds

AVERAGES = ("ema", "other")
ORDER = {"error": 0, "warning": 1, "note": 2}

TYPICAL = 0.9  # a decay that is 0 by default and in use
STEPS, LOST = 1000, 0.5  # after so many steps the noise of a sum may be this much of what it is a multiple of
SIDE = 8  # rows and columns of the weight on which a rule is tried
LATE = 1e6 + 1  # the step of which decays are: first steps are forgotten, and it is no multiple of an interval

LIFTS = (
    "a polar factor brings all singular values to 1, and with the small ones the noise of few bits: Muon's momentum in "
    "4 bits cost a small model 0.06 to 0.10 nats, in 5 bits 0.02 to 0.05, in 8 bits 0.02 at most. Keep it in 8 bits, "
    "or as a product of rank 8 beside 4 bits (0.01 to 0.02): low_rank(rule, ...), LowRankMuon"
)
SIGNS = (
    "the step has the sign of it, and with that the noise of few bits at full size, more of it the longer it averages: "
    "after 1000 steps in 4 bits weights were .01 (Signum), .02 (Tiger) and .08 of the way (Lion, at three times the "
    "loss) from exact ones, in 8 bits .003 to .005. Keep it in 8 bits: overrides={...} of the plan"
)
EVALUATED = (
    "the weights to evaluate with are made of it and have its noise: after 1000 steps in 4 bits they were .2 to 1.4 of "
    "the way from those of fp32, in 5 bits .2, in 8 bits .01 to .1. Keep it in 8 bits or in bf16: overrides={...} of "
    "the plan"
)


@dataclass(frozen=True)
class Finding:
    """One verdict; an error refuses the plan unless that says in `discouraged` why it exists.

    where  which tensors it is about, "" for all: " of vectors"
    """

    code: str
    severity: Severity
    state: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.code} {self.severity}: `{self.state}`{self.where}: {self.reason}"


# -- what the spec says


def recurrences(spec: Spec, flags: Mapping[str, bool] | None = None) -> dict[str, Recurrence]:
    """Every present state's recurrence, at the steps that change it, if there are any; decays as numbers."""
    return dict(_recurrences(spec, tuple(({f.name: f.default for f in spec.flags} | dict(flags or {})).items())))


@lru_cache(maxsize=4096)  # of a rule's flags, whose plans are many
def _recurrences(spec: Spec, flags: tuple[tuple[str, bool], ...]) -> dict[str, Recurrence]:
    from optgen.lang.symbolic import recurrence

    chosen = dict(flags)
    found = {s.name: recurrence(spec, spec.moving(chosen, s.name), s.name) for s in spec.present(chosen)}
    values = {part: value for h in spec.hypers for part, value in zip(h.parts, h.values, strict=True)}
    # A flag that says that a hyper-parameter is not 0 rules its default of 0 out.
    values |= {f.nonzero: TYPICAL for f in spec.flags if f.nonzero and chosen[f.name] and values.get(f.nonzero) == 0}
    values["step"] = LATE
    return {name: Recurrence(r.kind, _number(r.decay, values)) for name, r in found.items()}


@lru_cache(maxsize=1024)
def cancelling(spec: Spec, flags: tuple[tuple[str, bool], ...]) -> frozenset[str]:
    """Return the second moments v whose rounding cancels: what they normalize is read in quotients m / sqrt(v) alone.

    Such a step stays if each m is multiplied by c and its v by c squared.  That is tried where weight, gradient and eps
    are small beside them, early and late, with hyper-parameters beside their defaults and other scalars of the model.
    """
    found = {s.normalized_by for s in spec.present(dict(flags)) if s.normalized_by and s.space == spaces.elem}
    return frozenset(v for v in found if all(_cancels(spec, v, at) for at in spec.at_steps(dict(flags))))


def _cancels(spec: Spec, second: str, flags: dict[str, bool]) -> bool:
    trace = spec.trace(flags)
    if any(n.op in ("matmul", "call") for n in postorder(trace.new.values())):
        return False  # these mix elements whose c differ
    scalars = _beside(spec, flags)
    kept, powers = _moments(spec, second, flags, scalars)
    run = probe.ProbedTensor(tuple(zip(kept["p"], kept["g"], strict=True)), SIDE)
    for t in 5.0, 1e6:
        more = kept | {name: list(map(mul, kept[name], x)) for name, x in powers.items()}
        once, again = (run.values(list(trace.new.values()), scalars | {"step": t}, x) for x in (kept, more))
        for name, node in trace.new.items():
            wanted = list(map(mul, once[node.uid], powers[name])) if name in powers else once[node.uid]
            if not _agree(wanted, again[node.uid], kept["p"] if name == "p" else None):
                return False
        kept |= {s.name: [0.5] * run.size for s in spec.present(flags) if s.space == spaces.model}
    return True


def _beside(spec: Spec, flags: Mapping[str, bool]) -> dict[str, float]:
    """Return hyper-parameters a little under their defaults, and 1/2 for those that flags ask of; host states."""
    given = probe.host_values(spec, flags) | {s.name: s.init for s in spec.present_host(flags)}
    asked = {f.nonzero for f in spec.flags}
    return given | {h.name: 0.99 * h.default for h in spec.hypers if type(h.default) is float and h.name not in asked}


def _agree(a: list[float], b: list[float], before: list[float] | None) -> bool:
    """Return True if values are as good as equal; of a weight, if what a step adds is, and is not 0."""
    if before is not None:
        a, b = list(map(sub, a, before)), list(map(sub, b, before))
    moved = before is None or any(a)
    return moved and all(abs(x - y) <= 1e-9 + 1e-2 * abs(y) for x, y in zip(a, b, strict=True))


def _moments(
    spec: Spec, second: str, flags: dict[str, bool], scalars: Mapping[str, float]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return a weight, a gradient and states, and what the moments are multiplied by."""
    draws, present = random.Random(0), spec.present(flags)

    def numbers(size: float, of: Callable[[float], float] = float) -> list[float]:
        return [size * of(draws.gauss(0, 1)) for _ in range(SIDE * SIDE)]

    def first(s: StateDecl) -> list[float]:
        """Other second moments are larger here and smaller there; what is no moment is a gradient."""
        if s.nonneg:
            return numbers(2**-12, lambda x: 2 ** (x if s.name == second else 8 * x))
        return numbers(1 / 64 if s.name in powers else 1e-9)

    p, c = numbers(1e-6), numbers(1, lambda x: 2 ** round(x))
    powers = {s.name: c for s in present if s.normalized_by == second} | {second: [x * x for x in c]}
    kept = {s.name: first(s) if s.space == spaces.elem else probe.first_values(s, scalars, p) for s in present}
    return kept | {"p": p, "g": numbers(1e-9)}, powers


def _number(decay: Any, values: Mapping[str, float]) -> float | None:
    if decay is None or isinstance(decay, (int, float)):
        return decay
    number = decay.subs({symbol: values[symbol.name] for symbol in decay.free_symbols if symbol.name in values})
    return float(number) if number.is_number else None


# -- the verdicts


def overflow(spec: Spec, flags: Mapping[str, bool]) -> list[Finding]:
    """Return a finding for a value that the rule itself makes no number of late in training."""
    found = _late(spec, tuple(sorted(flags.items())))
    if found is None:
        return []
    name, value, place = found
    reason = f"at step {probe.LATE}, with default hyper-parameters, it is made of {value:g} at {place}"
    return [Finding("L15", "warning", name, reason)]


@lru_cache(maxsize=4096)
def _late(spec: Spec, flags: tuple[tuple[str, bool], ...]) -> Any:
    return probe.late(spec, dict(flags), spec.trace(dict(flags)))


def amplified(spec: Spec, storage: Storage, flags: Mapping[str, bool]) -> list[Finding]:
    """Return warnings for states in few codes whose noise reaches the weights at full size: in 4 bits where the rule
    takes a polar factor or a sign (but for comparisons), in 5 where weights to evaluate with are made of them.

    Residuals of low rank have none: what is left of their noise costs no more than that of 5 bits.
    """
    bits = {s.name: getattr(storage.states.get(s.name), "bits", 32) for s in spec.states if s.trait != "residual"}
    if min(bits.values(), default=32) > 5:
        return []
    nodes = postorder([spec.trace(dict(flags)).p])
    outside = unseen(nodes[-1], {n for n in nodes if n.dtype is dtypes.boolean})
    noisy = (
        ("L20", EVALUATED, 5, getattr(spec.evaluation, "states", ())),
        ("L18", LIFTS, 4, loads(n for n in nodes if n.attr == "newton_schulz")),
        ("L19", SIGNS, 4, loads(n for n in outside if n.op == "sign")),
    )
    found = [(code, x, why) for code, why, most, read in noisy for x in bits if x in read and bits[x] <= most]
    return [Finding(code, "warning", name, why) for code, name, why in found]


def vectors(spec: Spec) -> list[Finding]:
    """Return a note where the rule cannot step a parameter without rows and columns."""
    if not needs_matrix(spec, spec.flag_values({}, shape=(1024,))):
        return []
    reason = (
        "the rule reads rows and columns, so the optimizer refuses a model with biases. Write "
        "`is_matrix=shape_flag(lambda shape: len(shape) >= 2)` after the `*`, and start the rule with "
        "`if not is_matrix:` and the step of vectors"
    )
    return [Finding("L16", "note", "p", reason, " of vectors")]


def lint(recurrences: Mapping[str, Recurrence], storage: Storage, still: Collection[str] = ()) -> list[Finding]:
    """Everything there is to say about these states under this storage, errors first.

    still  states that the step leaves as they are: of those only the range counts, in which they began
    """
    out: list[Finding] = []
    for name, fmt in storage.states.items():
        found = _of_state(fmt, recurrences.get(name, Recurrence("other")), name in storage.nonneg)
        out += [Finding(code, grade, name, why) for code, grade, why in found if name not in still or code == "L5"]
    if storage.param is not dtypes.f32:
        out += [Finding(code, grade, "p", why) for code, grade, why in storage.master.findings(storage.param)]
    return sorted(out, key=lambda f: ORDER[f.severity])


def _of_state(fmt: Format, recurrence: Recurrence, nonneg: bool) -> Iterator[FormatFinding]:
    if fmt.exact:
        return
    yield from _of_format(fmt, nonneg)
    kind, decay = recurrence.kind, recurrence.decay
    if isinstance(fmt, OfMatrix):  # slow averages are none (formats.plan.coded_trait)
        return
    if "" not in fmt.fields():  # sums of elements, in fp32: nothing that adds up is rounded away
        if kind in ("max", "min"):
            what, back = ("maximum", "smaller") if kind == "max" else ("minimum", "larger")
            reason = f"a {what} of each element is not a {what} of means: what is kept of it can become {back} again"
            yield "L14", "warning", reason
        return
    if fmt.noise_bits == 0:
        yield from _to_nearest(fmt, kind, decay, nonneg)
    elif kind == "sum" and not nonneg:
        yield from _l17(fmt)
    yield from _l9(fmt, kind, decay)
    if kind == "constant" and fmt.noise_bits and not fmt.is_float:
        yield "L9", "error", "it never changes, yet is rounded anew at every step and wanders off"
    if kind == "multiplicative" and not fmt.is_float and not fmt.positive:
        yield "L10", "error", "it is only ever multiplied, and the format can round it to 0, where it would stay"


def _to_nearest(fmt: Format, kind: str, decay: float | None, nonneg: bool) -> Iterator[FormatFinding]:
    if kind == "ema" and decay is not None:
        yield from _l2(fmt, decay) if nonneg else _l1(fmt, decay)
    if kind in AVERAGES and (decay is None or abs(decay) >= 1):
        known = "its decay is not a number at build time" if decay is None else f"it recurs with {decay:g} of itself"
        reason = "where it is slow, rounding to nearest keeps the average from moving; round it stochastically"
        yield "L2", "warning", f"{known}: {reason}"
    if kind == "sum":
        reason = "it only grows, by ever smaller parts of itself"
        yield "L8", "error", f"{reason}, and nearest rounding drops whatever is below half a cell"
    if kind == "max" and decay is not None and decay < 1:
        yield from _l2(fmt, decay)


def _of_format(fmt: Format, nonneg: bool) -> Iterator[FormatFinding]:
    if not nonneg and not fmt.keeps_zero():
        yield "L3", "error", "the format has no exact 0: a state without gradients would drift"
    yield from fmt.findings(nonneg)
    if wide := wide_reductions(fmt):
        yield "L7", "warning", f"it needs {', '.join(wide)} before anything can be encoded: a second pass"


def _l1(fmt: Format, decay: float) -> Iterator[FormatFinding]:
    stuck, largest, of = stuck_set(fmt, decay)
    if stuck:
        reason = f"to nearest, {stuck} codes up to {largest:.2g} of the {of} keep themselves under a decay of {decay:g}"
        yield "L1", "error", f"{reason}: a state without gradients never returns to 0"


def _l2(fmt: Format, decay: float) -> Iterator[FormatFinding]:
    cell = fmt.cell()
    if cell > (1 - decay) / 2:
        reason = (
            f"the average freezes, and the step sizes made of it with it: a step under decay {decay:g} changes it by "
            f"{1 - decay:.2g} of itself at most, and rounding to nearest undoes that in cells of up to {cell:.2g}"
        )
        settled = bounds.steady_state(fmt, decay) if fmt.bound() is not None else None
        aside = f" ({settled})" if settled is not None and settled.of == "factor" else ""  # where it settles
        yield "L2", "error", f"{reason}{aside}; round it stochastically, or keep it in fp32"


def _l17(fmt: Format) -> Iterator[FormatFinding]:
    if (bound := fmt.bound()) is None:
        return
    spread = bound.value * math.sqrt(STEPS / 6)  # no error is forgotten, and the mean square of one is a sixth
    if spread >= LOST:
        reason = (
            "a signed sum keeps the noise of every store, and so does the weight that is made of it: after "
            f"{STEPS} steps an error of up to {spread:.2g} of the {bound.of}. MADGRAD's weights were .32 of the way "
            "from those of fp32 in 4 bits, .13 in 6 and .05 in 8. Keep it in 8 bits or in fp32: overrides={...} of the "
            "plan"
        )
        yield "L17", "warning", reason


def _l9(fmt: Format, kind: str, decay: float | None) -> Iterator[FormatFinding]:
    if kind not in ("max", "min") or decay not in (None, 1):
        return
    what, moves, halves = ("maximum", "climbs", "upward") if kind == "max" else ("minimum", "sinks", "downward")
    if fmt.noise_bits:
        reason = f"a running {what} {moves} on the {halves} halves of stochastic rounding and never comes back"
        yield "L9", "error", reason
    elif not fmt.still:
        reason = (
            "to nearest, a code keeps itself while the scale of its block moves slowly, and what it reads as moves "
            f"with the scale: a running {what} needs numbers that stay, as those of LogMinMax and floats do, "
            "and those of a format of one's own that says so by `still`"
        )
        yield "L9", "error", reason


# -- facts about formats


@lru_cache(maxsize=1024)
def stuck_set(fmt: Format, decay: float) -> tuple[int, float, str]:
    """(how many codes, the largest value, of what) with encode(decay * decode(code)) = code, 0 aside.

    The scale is held by another element of the block.  Under a negative decay none does: what does not become smaller
    changes its sign at every step, and two steps cancel.
    """
    return fmt.stuck(decay) if decay > 0 else (0, 0.0, "value")


# -- refusing


def linted(spec: Spec, storage: Storage, flags: Mapping[str, bool] | None = None, where: str = "") -> list[Finding]:
    """Return the findings; `where` as in Finding."""
    still = untouched(spec, storage, {f.name: f.default for f in spec.flags} | dict(flags or {}))
    return [replace(f, where=where) for f in lint(recurrences(spec, flags), storage, still)]


def check(
    spec: Spec, plan: Plan, storage: Storage, flags: Mapping[str, bool] | None = None, where: str = ""
) -> list[Finding]:
    """`linted`, which raises UserError for the first error of a plan that is not `discouraged`, too."""
    findings = linted(spec, storage, flags, where)
    errors = [f for f in findings if f.severity == "error"]
    if errors and not plan.discouraged:
        first = errors[0]
        finding = f"{first.code}, `{first.state}`{where} in {storage.states[first.state]}"
        words = {"spec": spec.name, "plan": plan.name, "state": first.state, "finding": finding, "reason": first.reason}
        raise UserError("E307", loc=(spec.loc, plan.loc), **words)
    return findings
