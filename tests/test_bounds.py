"""Derived bounds against exact suprema, checks of companders, and what a bound becomes over many steps."""

from __future__ import annotations

import math

import pytest
import torch

from optgen.base.errors import UserError
from optgen.driver.explain import memory, storage_lines
from optgen.formats import (
    Blocked,
    Codebook,
    Copy,
    Ecc8,
    Format,
    Fp8,
    Kahan,
    LogMax,
    LogMinMax,
    Native,
    Noise,
    Plan,
    Split,
    codebooks,
    compander,
    floats,
    fp16,
    fp32,
    linear,
    softsign,
    ue7m9,
    ue8m8,
)
from optgen.formats.companders import check, largest_error
from optgen.ops import dtypes
from optgen.verify.bounds import master_bound, one_step_bound, steady_state
from optgen.verify.certificate import certify
from specs import plans
from specs.adamw import adamw
from tests.test_formats import COMPANDERS, root

FORMATS: list[Format] = []
for rounding in ("nearest", "stochastic"):
    FORMATS += [Blocked(8, 16, c, ue8m8, rounding=rounding) for c in COMPANDERS]
    FORMATS += [Blocked(8, 16, c, ue8m8, signed=False, rounding=rounding) for c in (linear, softsign(1), root)]
    FORMATS += [Blocked(8, 16, softsign(1), fp32, rounding=rounding)]
    FORMATS += [Blocked(8, 16, linear, s, signed=False, of="sqrt", rounding=rounding) for s in (ue7m9, fp32)]
    FORMATS += [LogMinMax(8, 16, of=of, rounding=rounding) for of in ("sqrt", "value")]
    FORMATS += [LogMax(3, 16, octaves=2, rounding=rounding), LogMax(8, 16, octaves=20, rounding=rounding)]
    FORMATS += [floats.bf16.rounded(rounding), floats.f16.rounded(rounding)]
    FORMATS += [Codebook(codebooks.dynamic(True, 4), 4, 16, rounding=rounding)]
    FORMATS += [Codebook(codebooks.dynamic(False, 4, zero=False), 4, 16, ue7m9, of="sqrt", rounding=rounding)]
    FORMATS += [Codebook(codebooks.linear_nozero(), 4, 16, ue8m8, rounding=rounding)]
    FORMATS += [Fp8(kind, 16, rounding=rounding) for kind in ("e4m3", "e5m2")]
FORMATS += [Codebook(codebooks.dynamic(), 8, 16, ties="down", rounding="nearest")]
FORMATS += [Codebook((-0.9, -0.5, 0.0, 0.125, 0.5), 3, 16, rounding="nearest")]  # 1 is far beyond its end
FORMATS += [Blocked(8, 16, softsign(1), fp16, rounding="nearest")]
FORMATS += [Blocked(8, 16, linear, fp16, signed=False, of="sqrt", zero="keep", rounding="nearest")]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: str(f).replace(" ", "-"))
def test_the_bound_is_the_exact_supremum_within_a_thousandth(fmt: Format) -> None:
    certificate = certify(fmt)
    assert certificate.ratio == pytest.approx(1, abs=1e-3)
    assert certificate.supremum <= certificate.bound.total


@pytest.mark.parametrize("of", ["sqrt", "value"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("units", [2, 3, 8, 9, 20, 52, 64])
def test_minmax_bounds_hold_for_every_span(of: str, rounding: str, units: int) -> None:
    certificate = certify(LogMinMax(8, 16, of=of, rounding=rounding), units)  # type: ignore[arg-type]
    assert certificate.supremum <= certificate.bound.total
    # A cell is a whole number of patterns: off by half a pattern for each of up to 256 codes.
    assert certificate.ratio == pytest.approx(1, abs=1e-3 + certificate.bound.slack / certificate.bound.value)


def test_well_known_closed_forms() -> None:
    """Values of the literature."""

    def value(c: object, **kw: object) -> object:
        found = one_step_bound(Blocked(8, 64, c, **{"rounding": "nearest", **kw})).value  # type: ignore[arg-type]
        return pytest.approx(found, rel=1e-12)

    assert value(linear) == 1 / 254
    assert value(softsign(1)) == 2 / 255
    assert value(linear, signed=False) == 1 / 510
    assert value(softsign(1), rounding="stochastic") == 1 / 64
    assert one_step_bound(LogMinMax(8, 64, rounding="nearest"), 8).value == 1 / 128


def test_the_bounds_of_the_papers_tables() -> None:
    """Half of the widest gap, at the top: of the last decade's parts, 0.9 / 2^(b-2) wide, or of the 16 of k / 16."""

    def value(table: tuple[float, ...], bits: int) -> float:
        return one_step_bound(Codebook(table, bits, 64, rounding="nearest")).value

    places = 3 * 2.0**-24  # both ends of half a gap are off by up to three last places
    assert value(codebooks.dynamic(), 8) == pytest.approx(0.9 / 64 / 2, abs=places)
    assert value(codebooks.dynamic(False), 8) == pytest.approx(0.9 / 128 / 2, abs=places)
    assert value(codebooks.dynamic(True, 4), 4) == pytest.approx(0.9 / 4 / 2, abs=places)
    assert value(codebooks.linear_nozero(), 4) == 1 / 16  # below its first number
    assert one_step_bound(Fp8("e4m3", rounding="nearest")).value == pytest.approx(1 / 28)


def test_bounds_include_clamp_cells() -> None:
    """A curve whose code 0 reads high up has its worst cell at the bottom; only looking at the top would miss it."""
    steep = compander("steep", lambda n: n**0.1, lambda y: y**10)
    flat = compander("flat", lambda n: n**2, lambda y: y**0.5)
    assert largest_error(steep, 255, random=False) == pytest.approx(1 - (1 - 1 / 510) ** 10)
    assert largest_error(flat, 255, random=False) == pytest.approx((0.5 / 255) ** 0.5)
    fmt = Blocked(8, 16, flat, ue8m8, signed=False, rounding="nearest", zero="keep")
    # Code 0 takes everything below the root of half a code.
    assert certify(fmt).ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("param", [dtypes.bf16, dtypes.f16], ids=str)
@pytest.mark.parametrize(
    "master", [Native(), Native("stochastic"), Copy(), Kahan(), Split(8), Split(16), Ecc8()], ids=str
)
def test_bounds_of_weights_are_attained(master: object, param: dtypes.DType) -> None:
    bound = master_bound(master, param)  # type: ignore[arg-type]
    # One binade, every seventh pattern and all above its beginning, where a place is the largest part of a number.
    x = torch.cat([torch.arange(1 << 17), torch.arange(1 << 17, 1 << 23, 7)]).int().add(0x3F800000).view(torch.float32)
    count = master.noise_bits(param)  # type: ignore[attr-defined]
    worst = 0.0
    for word in (0, (1 << count) - 1) if count else (None,):
        noise = None if word is None else Noise(torch.full((), word, dtype=torch.int32), 0, count)
        kept = master.decode(master.encode(x, param, noise=noise), param)  # type: ignore[attr-defined]
        worst = max(worst, float(((kept.double() - x.double()) / x.double()).abs().max()))
    assert worst <= bound.total
    if bound.value:
        assert worst >= 0.95 * bound.value
    else:
        assert worst == 0


# -- checks of companders


def test_right_companders_pass() -> None:
    for c in COMPANDERS:
        check(c)


@pytest.mark.parametrize(
    ("curve", "inverse", "why"),
    [
        (lambda n: n * n, lambda y: y / 2, "inverse(curve("),
        (lambda n: n / 2, lambda y: 2 * y, "curve(1) = 0.5"),
        (lambda n: 4 * n * (1 - n), lambda y: y, "inverse(curve("),
        (lambda n: 1 - n, lambda y: 1 - y, "curve(0) = 1"),
        (lambda n: n + 0.1 * n * (1 - n) * (n - 0.5), lambda y: y, "inverse(curve("),
        (lambda n: 1 / n, lambda y: 1 / y, "fails"),
    ],
)
def test_wrong_companders_are_refused_with_the_place(curve: object, inverse: object, why: str) -> None:
    wrong = compander("wrong", curve, inverse)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        check(wrong)
    assert caught.value.code == "E304"
    assert why in caught.value.message
    assert caught.value.locs[0].file == __file__


def test_a_falling_stretch_is_found() -> None:
    with pytest.raises(UserError, match="does not increase"):
        check(compander("bent", lambda n: n if n < 0.5 else 0.75 - n / 2, lambda y: y))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("of", ["sqrt", "value"])
@pytest.mark.parametrize("units", [1, 2, 3, 7, 32, 51, 52, 63, 64])
def test_bounds_of_wide_blocks_hold_however_the_block_lies(of: str, rounding: str, units: int) -> None:
    """Blocks of a minimum, a maximum and what is between, at every offset from a unit's end, with extreme noise.

    Within the span that the bound is stated for it holds; what lies further below reads as it says.
    """
    fmt = LogMinMax(8, 16, of=of, rounding=rounding)  # type: ignore[arg-type]
    bound, (span, below) = one_step_bound(fmt, units), fmt.span(units)
    most = one_step_bound(fmt)
    offsets = torch.linspace(0, 2, 401, dtype=torch.float64)[:, None]
    for wanted in (span, span / 2, 31.4 if units == 64 else span, 45.0 if units == 64 else span):
        if wanted < 0:
            continue
        depth = torch.cat([torch.linspace(0, 1, 8), torch.linspace(0.97, 1, 8)]).double() * wanted
        kept = torch.exp2(offsets + 10 - depth)
        x = (kept if of == "value" else kept * kept).float()[:, None, :]
        true = x.double().sqrt() if of == "sqrt" else x.double()
        for word in (0, -1, 1 << 30):
            noise = Noise(torch.full_like(x, word, dtype=torch.int32), 8, 24) if fmt.noise_bits else None
            read = fmt._value(fmt.encode(x, noise=noise)).double()
            error = ((read - true) / true).abs()
            if wanted <= span:
                assert float(error.max()) <= bound.total
            top = true.amax(-1, keepdim=True)
            floor = top * 2.0**-below
            assert (read <= torch.maximum(true * (1 + most.total), floor)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_lies_under_a_fixed_grid_reads_as_its_beginning(bits: int) -> None:
    """Maxima at every place between two grid points, others down to the span that is stated, and far below it."""
    fmt = LogMax(bits, 16, octaves=min(2.0, ((1 << bits) - 1) / 2), rounding="stochastic")
    bound, span = one_step_bound(fmt), fmt.span()
    top = torch.exp2(torch.linspace(0, 2, 401, dtype=torch.float64))[:, None]
    depth = torch.cat([torch.linspace(0, 1, 8) * span, span + torch.linspace(0, 30, 8)]).double()
    x = (top * torch.exp2(-depth)).square().float()[:, None, :]
    true = x.double().sqrt()
    for word in (0, -1, 1 << 30):
        read = fmt.decode_root(fmt.encode(x, noise=Noise(torch.full_like(x, word, dtype=torch.int32), 20, 12))).double()
        assert ((read / true - 1).abs() <= bound.total)[..., :8].all()
        floor = true.amax(-1, keepdim=True) * 2.0**-span
        assert (read <= torch.maximum(true, floor) * (1 + bound.total)).all()
        assert (read > 0).all()


# -- over many steps


@pytest.mark.parametrize("fmt", [LogMax(3, 64), LogMinMax(4, 64)], ids=str)
def test_few_bits_follow_a_second_moment_that_moves_slowly(fmt: LogMax | LogMinMax) -> None:
    """Up and down by a factor of 15 within 1,000 steps, at most 5 % at a time, every element its block's maximum.

    If the end of a range held the largest back it would stay where it began.  Codes are unbiased, so the geometric
    mean over elements is within a cell of the root.
    """
    draw = torch.Generator().manual_seed(0)
    true = torch.ones(2, dtype=torch.float64)
    kept = fmt.decode(fmt.encode(torch.ones(2, 4, 64)))
    aim = torch.tensor([16.0, 0.0])
    for _ in range(1000):
        word = torch.randint(0, 1 << 12, kept.shape, generator=draw, dtype=torch.int32)
        kept = fmt.decode(fmt.encode(0.997 * kept + 0.003 * aim[:, None, None], noise=Noise(word, 0, 12)))
        true = 0.997 * true + 0.003 * aim
    assert float(true[0]) > 15
    assert float(true[1]) < 1 / 15
    cell = (one_step_bound(fmt, 3) if isinstance(fmt, LogMinMax) else one_step_bound(fmt)).total
    roots = torch.exp2(0.5 * (kept.double().log2().mean((1, 2)) - true.log2()))
    assert ((roots <= 1 + cell) & (roots >= 1 / (1 + cell))).all()


@pytest.mark.parametrize("decay", [0.9, 0.95, -0.9, -0.95])
def test_the_steady_bound_of_a_signed_average_is_nearly_attained(decay: float) -> None:
    """Nearest rounding under a scale that another element holds: the average of a pulse gets stuck where it may.

    Under a negative decay that of a pulse that alternates, which keeps its magnitude and alternates as well.
    """
    fmt = Blocked(8, 16, linear, fp32, rounding="nearest")
    bound = steady_state(fmt, decay)
    pulse = torch.linspace(0.05, 0.95, 200)
    value = torch.zeros(200, 1, 16)
    value[..., 0] = 1.0
    true, worst = torch.zeros(200, dtype=torch.float64), 0.0
    for t in range(600):
        x = pulse if t < 300 else 0 * pulse
        driven = (1 - abs(decay)) * x * (1 if decay > 0 else (-1) ** t)
        true = decay * true + driven
        value[..., 1] = decay * value[..., 1] + driven[:, None]
        value[..., 0] = 1.0
        value = fmt.decode(fmt.encode(value))
        worst = max(worst, float((value[:, 0, 1] - true).abs().max()))
    assert 0.9 * bound.high <= worst <= bound.high


def test_second_moments_stay_within_their_steady_factor() -> None:
    fmt = LogMinMax(8, 16, rounding="nearest")
    units, decay = 6, 0.95
    bound = steady_state(fmt, decay, units=units)
    assert 0 < bound.low < 1 < bound.high
    v = torch.logspace(0, -1.5, 16)[None, None]
    g2 = v.clone()
    kept = v.clone()
    for _ in range(400):
        v = decay * v + (1 - decay) * g2
        kept = fmt.decode(fmt.encode(decay * kept + (1 - decay) * g2))
        factor = kept / v
        assert bound.low <= float(factor.min())
        assert float(factor.max()) <= bound.high


def test_slow_averages_have_no_steady_bound_to_nearest() -> None:
    assert steady_state(LogMinMax(8, 64, rounding="nearest"), 0.999).high == float("inf")
    assert steady_state(floats.bf16, 0.999).high == float("inf")
    assert steady_state(floats.bf16, 0.95).high < 1.1
    assert steady_state(LogMinMax(8, 64, rounding="stochastic"), 0.999, units=8).rms == pytest.approx(0.125, rel=0.03)


@pytest.mark.parametrize("plan", [plans.int8_split24, plans.int4_split24, plans.int5_int3_split24], ids=str)
def test_the_range_says_that_infinities_read_as_numbers(plan: Plan) -> None:
    """Steps after a gradient whose square overflows are 0 in fp32 and too long here."""
    fmt = plan.nonneg
    block = torch.full((1, 1, 64), math.inf)
    assert torch.isfinite(fmt.decode(fmt.encode(block))).all()
    assert "Inf reads as a number" in one_step_bound(fmt).valid
    states = adamw.present({f.name: False for f in adamw.flags})
    text = " ".join(" ".join(storage_lines(memory(adamw, plan.storage(states, dtypes.bf16, False)))).split())
    assert "steps which it divides become too long where those of fp32 become 0" in text
