"""The lint: each rule fires where it must and only there, and what it claims happens when run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from optgen.base.errors import UserError
from optgen.base.loc import relative
from optgen.driver.judge import judge, look
from optgen.driver.memory import memory

from optgen.formats import (  # isort: skip
    Blocked, Codebook, Factored, Field, Format, Fp8, LogMinMax, Noise, Plan, Rank1, codebooks, f16, f32,
    floats, fp16, linear, measured, softsign, ue7m9, words,
)  # fmt: skip
from optgen.formats import bf16 as plain_bf16
from optgen.formats.companders import HALF
from optgen.formats.fp8 import numbers
from optgen.lang import Spec, col_mean, exp, flag, hyper, optimizer, row_mean, scalar, sqrt, state, where
from optgen.lang.declare import StateDecl
from optgen.lang.values import Num, bits, from_bits
from optgen.lang.wrappers import cautious, ema, gpa
from optgen.ops import dtypes, spaces
from optgen.verify import bounds, lint
from optgen.verify.lint import Recurrence
from specs import plans
from specs.adamw import adamw
from specs.lion import lion
from specs.madgrad import madgrad
from specs.schedule_free_adamw import schedule_free_adamw

EMA9, EMA999 = Recurrence("ema", 0.9), Recurrence("ema", 0.999)
NEAREST = Blocked(8, 64, softsign(1), rounding="nearest")
RANDOM = Blocked(8, 64, softsign(1), rounding="stochastic")
MINMAX = LogMinMax(8, 64, rounding="nearest")
TABLES = codebooks.dynamic(), codebooks.dynamic(signed=False)
ROOTS = Blocked(8, 64, linear, ue7m9, signed=False, rounding="nearest")
MOVING = [
    ROOTS,
    Blocked(8, 64, softsign(1), ue7m9, signed=False, rounding="nearest"),
    Codebook(codebooks.dynamic(signed=False), 8, 64),
    Rank1(8, vectors=64),
    Rank1(8, vectors=64).of_vectors(),
]
STILL = [plain_bf16, MINMAX]


def codes(fmt: Format, recurrence: Recurrence, *, nonneg: bool = False, severity: str = "error") -> list[str]:
    state = StateDecl("s", spaces.elem, nonneg=nonneg)
    plan = Plan("One state.", name="one", overrides={"s": fmt})
    storage = plan.storage((state,), dtypes.f32, False)
    return [f.code for f in lint.lint({"s": recurrence}, storage) if f.severity == severity]


@pytest.mark.parametrize(
    ("fmt", "recurrence", "nonneg", "expected"),
    [
        (NEAREST, EMA9, False, ["L1"]),
        (NEAREST, Recurrence("ema", -0.9), False, []),  # signs alternate, so two steps cancel
        (RANDOM, EMA9, False, []),
        (f32, EMA999, False, []),
        (plain_bf16, EMA9, False, []),
        (plain_bf16, EMA999, False, ["L1"]),
        (plain_bf16, EMA999, True, ["L2"]),
        (plain_bf16, Recurrence("ema", 0.95), True, []),
        (floats.bf16_auto, EMA999, True, []),
        (MINMAX, EMA999, True, ["L2"]),
        (MINMAX.rounded("stochastic"), EMA999, True, []),
        (MINMAX, Recurrence("max", 1.0), True, []),
        (MINMAX, Recurrence("max", 0.999), True, ["L2"]),
        (MINMAX.rounded("stochastic"), Recurrence("max", 1.0), True, ["L9"]),
        (MINMAX.rounded("stochastic"), Recurrence("max", 0.999), True, []),
        (MINMAX.rounded("stochastic"), Recurrence("min", 1.0), True, ["L9"]),
        *((fmt, Recurrence(kind, 1.0), True, ["L9"]) for fmt in MOVING for kind in ("max", "min")),
        *((fmt, Recurrence(kind, 1.0), True, []) for fmt in STILL for kind in ("max", "min")),
        (MINMAX, Recurrence("sum", 1.0), True, ["L8"]),
        (plain_bf16, Recurrence("sum", 1.0), True, ["L8"]),
        (MINMAX.rounded("stochastic"), Recurrence("sum", 1.0), True, []),
        (MINMAX, Recurrence("previous"), True, []),
        (RANDOM, Recurrence("constant"), False, ["L9"]),
        (NEAREST, Recurrence("constant"), False, []),
        (NEAREST, Recurrence("multiplicative"), False, ["L10"]),
        (MINMAX.rounded("stochastic"), Recurrence("multiplicative"), True, []),
        (Rank1(2), EMA999, True, ["L2"]),
        (Rank1(4), EMA999, True, ["L2"]),
        *((fmt, EMA9, False, ["L1"]) for fmt in (Codebook(TABLES[0]), Fp8())),
        *((fmt, EMA999, True, ["L2"]) for fmt in (Codebook(TABLES[1]), Fp8())),
        (Codebook((-1.0, -0.5, 0.5, 1.0), 2), Recurrence("previous"), False, ["L3"]),
        (plans.torchao_fp8.signed, EMA9, False, ["L5", "L1"]),
        (Factored(), EMA999, True, []),
        (f16.rounded("stochastic"), EMA9, False, ["L5"]),
        (Blocked(8, 64, softsign(1), fp16, rounding="stochastic"), EMA9, False, ["L5", "L6"]),
    ],
)
def test_errors(fmt: Format, recurrence: Recurrence, nonneg: bool, expected: list[str]) -> None:
    assert codes(fmt, recurrence, nonneg=nonneg) == expected


def test_unknown_decays_are_warned_of() -> None:
    for decay in (None, 1.0, 1.25, -1.0):
        assert codes(NEAREST, Recurrence("other", decay), severity="warning") == ["L2"]
        assert codes(RANDOM, Recurrence("other", decay), severity="warning") == []


def test_means_of_rows_and_columns_keep_no_extreme() -> None:
    for kind in ("max", "min"):
        assert codes(Factored(), Recurrence(kind, 1.0), nonneg=True, severity="warning") == ["L7", "L14"]


class Offset(Blocked):
    """A format without a zero code: every value reads half a code too high."""

    def decode(self, parts: object, *, root: object = None) -> object:  # type: ignore[override]
        return super().decode(parts, root=root) + self.scale.decode(parts["scale"]) / 254  # type: ignore[index, arg-type]


@dataclass(frozen=True)
class Own(Format):
    """A format of somebody else's, which says no more than it must; it keeps what another one does."""

    other: Format = plain_bf16

    @property
    def block(self) -> int:
        return self.other.block

    def fields(self) -> dict[str, Field]:
        return self.other.fields()

    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        return self.other.encode(x)

    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        return self.other.decode(parts)


class StillOwn(Own):
    """The same, which says that its numbers stay."""

    @property
    def still(self) -> bool:
        return True


class WholeTensor(Blocked):
    """A format that divides by the largest element of the tensor first."""

    def encode(self, x: object, **kw: object) -> object:  # type: ignore[override]
        from optgen.ir import node as ir
        from optgen.lang.values import Value

        if isinstance(x, Value):
            x = x / Value(ir.op("tensor_max", x.node))
        return super().encode(x, **kw)  # type: ignore[arg-type]


class Again(Blocked):
    """A format that looks for a block's largest once more, in units of what it was."""

    def encode(self, x: Num, **kw: Any) -> dict[str, Num]:
        return super().encode(x / from_bits(words.block_top(bits(abs(x)), self.block)), **kw)


def test_formats_of_others_are_looked_at_from_outside() -> None:
    assert codes(Offset(8, 64, rounding="stochastic"), EMA9) == ["L3"]
    with pytest.raises(UserError, match="E305"):
        codes(WholeTensor(8, 64, rounding="stochastic"), EMA9)
    with pytest.raises(UserError, match=r"E305.*by what it has found of that block"):
        codes(Again(8, 64, rounding="stochastic"), EMA9)
    assert codes(Own(), Recurrence("max", 1.0), nonneg=True) == ["L9"]
    assert codes(StillOwn(), Recurrence("max", 1.0), nonneg=True) == []
    assert codes(Own(), EMA999, nonneg=True) == ["L2"]
    assert codes(Own(), Recurrence("ema", 0.95), nonneg=True) == []


def test_a_format_of_ones_own_keeps_a_second_moment_or_is_refused() -> None:
    """Nobody has derived a bound for it: what does without one goes on, and says so."""
    own = Plan("One of ours.", nonneg=Own())
    with pytest.raises(UserError, match="L2, `exp_avg_sq` in Own") as caught:
        judge(adamw, own)
    assert "cells of up to 0.0078;" in str(caught.value)
    states = adamw.present({f.name: False for f in adamw.flags})
    kept = {row.name: row for row in memory(adamw, own.storage(states, dtypes.f32, False), lint.recurrences(adamw))}
    assert (kept["exp_avg_sq"].error, kept["exp_avg_sq"].steady) == ("no bound is known", "")
    exact = own.but(name="exact", nonneg=StillOwn(f32))
    assert not look(adamw, exact).refused


@pytest.mark.parametrize(
    ("fmt", "cell", "off"),
    [
        (f32, 2.0**-23, 0.0),
        (plain_bf16, 2.0**-7, 0.0),
        (Codebook(codebooks.linear_nozero(4), 4, 64), 1.0, 0.0),  # from 1 / 16 to 2 / 16
        (ROOTS, HALF**-2 - 1, 2.0**-20),  # code 0 reads as half a code, almost
        (replace(ROOTS, scale=fp16), math.inf, 0.0),
        (MINMAX, (19 / 17) ** 2 - 1, 2.0**-20),  # four cells of half an octave, of which the middles are kept
    ],
    ids=str,
)
def test_cells_of_unknown_formats_are_measured(fmt: Format, cell: float, off: float) -> None:
    assert Own(fmt).cell() == pytest.approx(cell, rel=off)


@pytest.mark.parametrize(("decay", "count", "largest"), [(0.9, 5, 0.020), (0.95, 10, 0.041), (0.99, 68, 0.37)])
def test_stuck_codes_of_softsign(decay: float, count: int, largest: float) -> None:
    """The study's figures for 127 softsign codes; and exactly those codes keep themselves when run."""
    found, top, _ = lint.stuck_set(NEAREST, decay)
    assert (found, round(top, 3 if top < 0.1 else 2)) == (count, largest)
    block = torch.zeros(128, 1, 64)
    block[:, 0, 0] = 1.0
    block[:, 0, 1] = NEAREST.compander.inverse(torch.arange(128) / 127)
    value = NEAREST.decode(NEAREST.encode(block))
    before = NEAREST.encode(block)[""][:, 0, 1]
    value[:, 0, 1] *= decay
    value[:, 0, 0] = 1.0
    assert int((NEAREST.encode(value)[""][:, 0, 1] == before)[1:].sum()) == count


def test_weights_are_judged() -> None:
    for plan, code, severity in (
        (plans.bf16, "L11", "warning"),
        (plans.int8_rn_split24, "L11", "note"),
        (plans.int8_split24, None, None),
        (plans.split32, None, None),
        (plans.fp32_master, None, None),
    ):
        found = lint.lint({}, plan.storage((), dtypes.bf16, False))
        assert [(f.code, f.severity) for f in found] == ([(code, severity)] if code else []), plan.name
        assert lint.lint({}, plan.storage((), dtypes.f32, False)) == []


def test_findings_about_vectors_say_so() -> None:
    """Factored moments are averages as they are, those of vectors under lpmm4_factor 4-bit codes to nearest."""
    found = [f for f in look(adamw, plans.lpmm4_factor).findings if f.state == "exp_avg_sq"]
    assert [(f.code, f.where) for f in found] == [("L2", " of vectors"), ("L7", "")]
    assert str(found[0]).startswith("L2 error: `exp_avg_sq` of vectors: the average freezes")
    with pytest.raises(UserError, match="L2, `exp_avg_sq` of vectors in 4-bit unsigned blocks of 128"):
        judge(adamw, plans.lpmm4_factor.but(name="unexplained", discouraged="", signed=floats.f32))


# -- what it claims, run


GROWTH = 1.004 ** torch.arange(600, dtype=torch.float64)  # to 10.9 times: the root by 0.2 % a step


def held(fmt: Format) -> torch.Tensor:
    """Return maxima that were reached at first, in parts of themselves, after one beside each of them has grown.

    Their roots are 0.22 to 0.45 of the first scale, linear codes 57 to 114: a step of the scale of a root, of 0.4 % at
    most where it is two of ue7m9's, moves none of them by half a code.
    """
    shape = (64, 64) if fmt.matrix else (64, 1, 64)
    true = torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 0.15 + 0.05
    state = torch.zeros(shape)
    for size in GROWTH:
        seen = true if size == 1 else torch.zeros(shape)
        seen[..., 0] = size
        if fmt.matrix:
            seen[0] = size
        state = fmt.decode(fmt.encode(torch.maximum(state, seen)))
    kept = state.double() / true.double()
    return kept[1:, 1:] if fmt.matrix else kept[..., 1:]


def rounded_a_few_times(fmt: Format) -> float:
    """The error of numbers of at least 0.05 beside one that moves between 1 and 10.9.

    They are rounded when they are reached, and again where cells change: for `LogMinMax` with the number of octaves
    that the block spans, up to nine and five other numbers, for powers of two with the scale: 1, 2 and 4 of roots.
    """
    if isinstance(fmt, LogMinMax):
        return (1 + fmt.bound(9).total) ** (2 * 6) - 1
    if isinstance(fmt, Blocked):
        return (1 + bounds.one_step_bound(fmt).total * (1 + 2 + 4) / 0.05**0.5) ** 2 - 1
    step = bounds.one_step_bound(fmt)
    return (1 + step.total) ** (2 if step.of == "root" else 1) - 1


@pytest.mark.parametrize("fmt", STILL, ids=str)
def test_numbers_that_stay_keep_a_maximum(fmt: Format) -> None:
    assert fmt.still
    assert float((held(fmt) - 1).abs().max()) <= rounded_a_few_times(fmt)


@pytest.mark.parametrize(
    "fmt",
    [
        *(Fp8(kind, 16) for kind in ("e4m3", "e5m2")),
        *(Codebook(table, 8, 16) for table in TABLES),
        Rank1(4, vectors=16).of_vectors(),
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", [0.5, 0.75, 0.9, 0.95, 0.99, 0.999])
def test_codes_get_stuck_as_counted(fmt: Any, decay: float) -> None:
    """Each reading beside the block's largest, encoded for real under a scale of 1; what reads for 0 aside."""
    readings = numbers(fmt.kind)[1:] if isinstance(fmt, Fp8) else [k / 16 for k in range(1, 17)]
    readings = [x for x in fmt.table if x] if isinstance(fmt, Codebook) else readings
    block = torch.tensor(readings)[:, None, None].repeat(1, 1, 16)
    block[:, 0, 0] = readings[-1]
    kept = fmt.decode(fmt.encode(torch.cat([block[..., :1], block[..., 1:] * decay], -1)))[:, 0, 1]
    stuck = block[kept == block[:, 0, 1], 0, 1]
    assert lint.stuck_set(fmt, decay)[0] == len(stuck)
    assert lint.stuck_set(fmt, decay)[1] == pytest.approx(float(stuck.abs().max()) / readings[-1] if len(stuck) else 0)


def test_what_keeps_0_is_what_is_seen_to() -> None:
    """By what formats are, and encoded for real: every format of the plans, those that have no 0 among them."""
    found = {x for p in vars(plans).values() if isinstance(p, Plan) for x in (p.signed, p.nonneg, p.initial)}
    found |= {Codebook((-1.0, -0.25, 0.5, 1.0), 2), Blocked(8, 64, signed=False)}
    found |= {Fp8("e5m2")}
    seen = {fmt: fmt.keeps_zero() for fmt in found}
    assert seen == {fmt: measured.keeps_zero(fmt) for fmt in found} and set(seen.values()) == {False, True}


@optimizer()
def rising(p, g, t, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * (2.0**t / (1 + 2.0**t)) * g
    return p


@optimizer()
def beyond_fp32(p, g, t, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = m + g
    p = p - lr * m / (1 + exp(t / 10_000) * abs(m))
    return p, m


@optimizer()
def falling(p, g, t, s=scalar(1.0), *, lr=hyper(1e-3, ge=0)):
    s = s + where(t > 9, 1 / exp(t), 1.0)
    p = p - lr / (s + 2.0**t) * g
    return p, s


def test_a_rule_whose_step_is_no_number_late_in_training_is_warned_of() -> None:
    """In any format; an infinity that only divides is none of it."""
    (found,) = (f for f in look(rising, plans.fp32).findings if f.code == "L15")
    assert (found.severity, found.state) == ("warning", "p")
    said = f"at step 1000000, with default hyper-parameters, it is made of inf at {relative(__file__)}:"
    assert said in found.reason
    assert [f.code for f in judge(rising, plans.split32).findings if f.severity != "note"] == ["L15"]
    (found,) = lint.overflow(beyond_fp32, {})
    assert "made of nan" in found.reason  # 0 times what fp32 has no number for
    assert lint.overflow(falling, {}) == lint.overflow(adamw, {"amsgrad": True, "decouple_lr": False}) == []


@optimizer(cite="none")
def by_rows(p, g, m=state(), *, lr=hyper(1e-3, ge=0), wide=flag(False)):
    size = row_mean(g * g) if wide else col_mean(g * g)
    m = 0.9 * m + g / (sqrt(size) + 1e-8)
    p = p - lr * m
    return p, m


def test_a_rule_of_rows_says_that_it_refuses_vectors() -> None:
    for found in (look(by_rows, plans.fp32).findings, judge(by_rows, plans.int8_split24).findings):
        (note,) = (f for f in found if f.code == "L16")
        assert note.severity == "note"
        assert "is_matrix=shape_flag(lambda shape: len(shape) >= 2)" in str(note)
        assert "`if not is_matrix:`" in str(note)


@optimizer()
def from_the_start(p, g, gradients=state(), start=state(init="param"), *, lr=hyper(1.0, ge=0)):
    """Dual averaging: the weight is made of a sum, without the weight before."""
    gradients = gradients + g
    p = start - lr * gradients
    return p, gradients, start


@pytest.mark.parametrize(
    ("spec", "plan", "found"),
    [(madgrad, plans.int4_split24, {"L17"}), (madgrad, plans.int6_split24, {"L17"}), (madgrad, plans.int8_split24, {}),
     (madgrad, plans.bf16_sr, {}), (from_the_start, plans.int4_split24, {"L17"}), (adamw, plans.int4_split24, {}),
     (lion, plans.int4_split24, {"L19"}), (lion, plans.int5_split24, {}), (cautious(lion), plans.int4_split24, {"L19"}),
     (cautious(adamw), plans.int4_split24, {}), (ema(adamw), plans.int5_split24, {}),
     (ema(lion), plans.int4_split24, {"L19"}), (schedule_free_adamw, plans.int5_split24, {"L20"}),
     (gpa(adamw), plans.int8_split24, {})],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
def test_noise_of_few_bits_that_reaches_the_weights_is_told(spec: Spec, plan: Plan, found: set[str]) -> None:
    """Noise of a signed sum, of a sign and of weights to evaluate with."""
    assert {"L17", "L19", "L20"} & {f.code for f in look(spec, plan).findings} == set(found)
    assert not look(spec, plan).refused
