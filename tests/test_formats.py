"""Every format holds what it says: bounds, idempotence, exact zeros, unbiased rounding, NaN and Inf.

Formats are called with tensors of shape (rows, blocks, block): the same functions that compile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optgen.base.errors import UserError

from optgen.formats import (  # isort: skip
    Blocked, Codebook, Copy, Ecc8, Float, Format, Fp8, LogMinMax, Master, Native, Noise, Rank1,
    Split, codebooks, floats, fp16, fp32, linear, softsign, ue7m9, ue8m8,
)  # fmt: skip
from optgen.formats.bound import ROUNDOFF
from optgen.formats.scales import LARGEST, Scale
from optgen.ops import dtypes
from optgen.verify.bounds import master_bound, one_step_bound, steady_state
from optgen.verify.differential import BlockView
from optgen.verify.intervals import Interval
from specs import plans
from tools.certificate import certify

COMPANDERS = (linear, softsign(1), softsign(1.5), softsign(0.75), softsign(7))
SCALES = (ue8m8, ue7m9, fp32)

SIGNED: list[Format] = [Blocked(8, 64, c, ue8m8) for c in COMPANDERS]
SIGNED += [Blocked(8, 16, softsign(1), fp32), Blocked(8, 256, linear, ue8m8)]
SIGNED += [Blocked(b, 64, softsign(1), ue8m8) for b in (7, 6, 5, 4, 3, 2)] + [Blocked(4, 128, linear, fp32)]
SIGNED += [floats.bf16_auto, Float(dtypes.f16, "auto")]
UNSIGNED: list[Format] = [Blocked(8, 64, linear, s, signed=False) for s in (ue7m9, fp32)]
UNSIGNED += [Blocked(8, 64, softsign(1), fp32, signed=False)]
UNSIGNED += [Blocked(b, 64, linear, fp32, signed=False) for b in (6, 4)]
UNSIGNED += [LogMinMax(8, b) for b in (16, 64)] + [LogMinMax(b, 64) for b in (7, 6, 5, 4)] + [LogMinMax(5, 16)]
FORMATS = SIGNED + UNSIGNED
MASTERS = (Native(), Native("stochastic"), Copy(), Split(8, "nearest"), Split(8), Split(16), Ecc8())
NARROW = (dtypes.bf16, dtypes.f16)


def name_of(x: object) -> str:
    return str(x).replace(" ", "-")


each_format = pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
each_master = pytest.mark.parametrize("master", MASTERS, ids=name_of)
each_narrow = pytest.mark.parametrize("param", NARROW, ids=str)


def noise(fmt_bits: int, value: int | Tensor) -> Noise | None:
    if not fmt_bits:
        return None
    return Noise(torch.as_tensor(value, dtype=torch.int32), 0, fmt_bits)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def equal_parts(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


@st.composite
def groups(draw: st.DrawFn, size: int, low: int = -120, high: int = 120) -> Tensor:
    """(1, blocks, size): numbers around a common exponent, with zeros, subnormals and far-off elements among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = draw(st.integers(1, 3))
    exponent = draw(st.integers(low, high))
    spread = draw(st.sampled_from([0.0, 0.5, 2.0, 8.0, 40.0]))
    x = rng.standard_normal((1, blocks, size)) * 2.0 ** (exponent + spread * rng.standard_normal((1, blocks, size)))
    x = np.clip(x, -LARGEST, LARGEST).astype(np.float32)
    kind = draw(st.sampled_from(["all", "zeros", "subnormal", "one", "equal", "extreme"]))
    pick = rng.random(x.shape) < 0.3
    if kind == "zeros":
        x[pick] = 0
    elif kind == "subnormal":
        x[pick] = rng.integers(-(1 << 22), 1 << 22, int(pick.sum())).astype(np.float32) * np.float32(2.0**-149)
    elif kind == "one":
        x[..., 1:] = 0
    elif kind == "equal":
        x[:] = x[..., :1]
    elif kind == "extreme":
        x[..., 0] = LARGEST * draw(st.sampled_from([1.0, -1.0]))
    return torch.from_numpy(x)


def of_format(fmt: Format) -> st.SearchStrategy[Tensor]:
    low, high = (-20, 12) if isinstance(fmt, Float) and fmt.dtype is dtypes.f16 else (-120, 120)
    size = max(fmt.block, 16)
    return groups(size, low, high) if fmt.signed else groups(size, low, high).map(abs)


def words(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)


def draw_noise(fmt: Format, x: Tensor, seed: int | None) -> Noise | None:
    return None if seed is None else noise(fmt.noise_bits, words(tuple(x.shape), seed) & ((1 << fmt.noise_bits) - 1))


# -- states
@each_format
@given(data=st.data())
def test_encoding_what_was_decoded_changes_nothing(fmt: Format, data: st.DataObject) -> None:
    once = fmt.encode(data.draw(of_format(fmt)))
    again = fmt.encode(fmt.decode(once))
    if isinstance(fmt, Blocked) and fmt.scale is fp32:
        # A scale with all its bits moves by the roundings of the largest element, the codes do not.
        scale = once.pop("scale").double()
        assert ((again.pop("scale").double() / scale - 1).abs() <= 2.0**-19).all()
    assert equal_parts(once, again)


@each_format
@given(data=st.data(), seed=st.none() | st.integers(0, 999))
def test_the_error_of_a_step_is_within_the_derived_bound(fmt: Format, data: st.DataObject, seed: int | None) -> None:
    x = data.draw(of_format(fmt))
    parts = fmt.encode(x, noise=draw_noise(fmt, x, seed))
    used = fmt.rounded("nearest") if seed is None else fmt
    kept, true = fmt.decode(parts).double(), x.double()
    if isinstance(used, Float):
        # Absolute half (or whole) steps of the subnormal range below the smallest normal number.
        least, step = {"bf16": (2.0**-126, 2.0**-133), "f16": (2.0**-14, 2.0**-24)}[used.dtype.name]
        allowed = one_step_bound(used).total * true.abs().clamp(min=least) + step
        finite = kept.isfinite()
        assert (finite | (true.abs() > {"bf16": 3.38e38, "f16": 65504.0}[used.dtype.name])).all()
        assert ((kept - true).abs() <= allowed)[finite].all()
    elif isinstance(used, Blocked):
        scale = used.scale.decode(parts["scale"]).double()
        top = (true.sqrt() if used.of == "sqrt" else true.abs()).amax(-1, keepdim=True)
        assert (scale <= top.clamp(min=used.scale.low) * (1 + used.scale.excess) * (1 + ROUNDOFF)).all()
        # The root of an f32 is rounded before it is a scale.
        assert (scale >= top.clamp(max=used.scale.high) * (1 - ROUNDOFF)).all()
        if used.of == "sqrt":
            kept, true = fmt.decode_root(parts).double(), true.sqrt()
        # Numbers below 2^-126 have fewer digits: one step of theirs on the way in and out.
        assert ((kept - true).abs() <= one_step_bound(used).total * scale + 2.0**-148).all()
    else:
        assert isinstance(used, LogMinMax)
        check_log(used, parts, true, fmt)


def check_log(used: LogMinMax, parts: dict[str, Tensor], true: Tensor, fmt: Format) -> None:
    kept, true = fmt.decode_root(parts).double(), true.sqrt()
    least, top = 2.0**-63, 2.0**63.9
    octaves = used.most * 0.5
    k = (parts["range"].int() & 0xFF).double()
    cell = 0.5 / k
    half = cell if used.noise_bits else cell / 2
    reached = true.clamp(max=top)
    low = (reached.amax(-1, keepdim=True) * 2.0 ** -(octaves - 1)).clamp(min=least)
    slack = one_step_bound(used).slack
    inside = reached >= low
    assert ((kept - reached).abs() <= (half + slack) * reached)[inside].all()
    assert (kept > 0).all()
    # What lies too far below reads as no more than the end of the first cell there.
    assert (kept[~inside] <= (low * (1 + 2 * cell)).expand_as(kept)[~inside]).all()


@each_format
@given(data=st.data(), seed=st.none() | st.integers(0, 999))
def test_zero_stays_zero_and_a_second_moment_never_becomes_it(
    fmt: Format, data: st.DataObject, seed: int | None
) -> None:
    x = data.draw(of_format(fmt))
    x[..., ::3] = 0
    parts = fmt.encode(x, noise=draw_noise(fmt, x, seed))
    kept = fmt.decode(parts)
    if fmt.signed:
        assert (kept[x == 0] == 0).all()
        return
    if fmt.positive:
        assert (kept >= 2.0**-126).all()
        assert (fmt.decode_root(parts) > 0).all()
    live = (x > 0) & (x > x.amax(-1, keepdim=True) * 2.0**-40) & (x > 2.0**-60)
    assert (kept[live] > 0).all()


@each_format
def test_a_fresh_state_decodes_to_zero(fmt: Format) -> None:
    size = max(fmt.block, 16)
    parts = {}
    for suffix, f in fmt.fields().items():
        shape = (1, 1, size if f.per == 1 else 1)
        parts[suffix] = torch.full(shape, f.zero, dtype=getattr(torch, f.dtype.torch))
    assert torch.equal(fmt.decode(parts), torch.zeros(1, 1, size))


@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3, 2])
def test_a_fresh_code_is_zero_s(bits: int) -> None:
    """Not only a code under a scale of 0, whose product may be -0."""
    fmt = Blocked(bits, 64)
    parts = {suffix: torch.tensor(f.zero, dtype=torch.uint8) for suffix, f in fmt.fields().items() if suffix != "scale"}
    zeros = fmt.encode(torch.zeros(1, 1, 64))
    assert int(fmt.code(parts)) == fmt.fresh == int(torch.as_tensor(fmt.code(zeros)).unique())


def code_of(fmt: Format, parts: dict[str, Tensor]) -> Tensor:
    """The code as a number that stochastic rounding keeps the mean of."""
    if isinstance(fmt, Float):
        return fmt.decode(parts).double()
    return torch.as_tensor(fmt.code(parts)).double()


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.noise_bits <= 13], ids=name_of)
def test_stochastic_rounding_is_unbiased_over_all_its_noise(fmt: Format) -> None:
    """The mean code over every value of the noise is the unrounded code: to half a step of the noise."""
    draws = 1 << fmt.noise_bits
    size = max(fmt.block, 16)
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal((1, 4, size)).astype(np.float32))
    x = x if fmt.signed else x.abs()
    mean, square = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for part in torch.arange(draws, dtype=torch.int32).split(256):
        many = x.expand(len(part), -1, -1)
        code = code_of(fmt, fmt.encode(many, noise=noise(fmt.noise_bits, part[:, None, None])))
        mean += code.sum(0) / draws
        square += (code**2).sum(0) / draws
    if isinstance(fmt, Float):
        step = x.double().abs() * 2.0**-10
        assert ((mean - x.double()).abs() <= 2.0**-fmt.noise_bits * step + 2.0**-24 * 2.0**-8).all()
        return
    spread = square - mean**2
    fraction = mean - mean.floor()
    # Two neighbouring codes, and no others: the variance is that of one coin.
    assert (spread - fraction * (1 - fraction)).abs().max() < 1e-6
    exact = exact_code(fmt, x)
    # Half a step of the noise, and the roundings of the code itself.
    assert (mean - exact).abs().max() <= 2.0 ** -(fmt.noise_bits + 1) + 4 * 255 * ROUNDOFF


def exact_code(fmt: Format, x: Tensor) -> Tensor:
    """The unrounded code in f64, by the definition of the format."""
    true = x.double()
    parts = fmt.encode(x, noise=noise(fmt.noise_bits, 0))
    if isinstance(fmt, Blocked):
        n = (true.sqrt() if fmt.of == "sqrt" else true) / fmt.scale.decode(parts["scale"]).double()
        code = fmt.codes * torch.as_tensor(fmt.compander.curve(n.abs())) * n.sign()
        return code + fmt.fresh
    assert isinstance(fmt, LogMinMax)
    pattern = x.sqrt().view(torch.int32).long()
    header = parts["range"].int().long() & 0xFFFF
    start = ((header >> 8) << fmt.unit) + fmt.lowest
    # What lies below the block's first cell is raised to it.
    return ((pattern - start) * (header & 0xFF) / 2.0**fmt.unit - 0.5).clamp(min=0)


TABLES = [plans.bnb8.signed, plans.torchao4.signed, plans.torchao_fp8.signed]


OF_BLOCKS = [f for f in FORMATS if f.block > 1] + TABLES
# Quiet NaNs and signalling ones, of either sign: of x86, of NVIDIA's arithmetic, with a payload, of memory.
NANS = torch.tensor([0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7FC12345, 0x7F800001, -0x7FFFFF], dtype=torch.int32)


@pytest.mark.parametrize("fmt", OF_BLOCKS, ids=name_of)
@given(data=st.data())
def test_a_nan_stays_in_its_element(fmt: Format, data: st.DataObject) -> None:
    """Neighbours of NaNs have the bits that they have beside the smallest of them.  A NaN reads as a number, not much
    larger than its block's largest magnitude or the smallest scale, or as a NaN again.
    """
    x = data.draw(of_format(fmt))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    seed, share = data.draw(st.sampled_from([None, 1, 2])), data.draw(st.sampled_from([0.02, 0.3, 1.0]))
    met = torch.rand(x.shape, generator=draw) < share
    spoilt = x.clone()
    spoilt.view(torch.int32)[met] = NANS[torch.randint(0, len(NANS), (int(met.sum()),), generator=draw)]
    least = torch.where(met, math.inf, x.abs()).amin(-1, keepdim=True)
    between = torch.where(met, least.nan_to_num(posinf=0.0), x)
    kept, clean = (fmt.decode(fmt.encode(v, noise=draw_noise(fmt, x, seed))) for v in (spoilt, between))
    assert torch.equal(bits(kept)[~met], bits(clean)[~met])
    most = 4 * clean.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    assert (kept.isnan() | (kept.abs() <= most))[met].all()


@pytest.mark.parametrize("fmt", OF_BLOCKS, ids=name_of)
def test_an_infinity_stays_in_its_block(fmt: Format) -> None:
    x = torch.rand(1, 3, fmt.block, generator=torch.Generator().manual_seed(1)) - (0.5 if fmt.signed else 0.0)
    clean = fmt.decode(fmt.encode(x))
    for bad in (math.inf, *([-math.inf] if fmt.signed else [])):
        x[0, 1, 5], x[0, 1, 6] = bad, math.nan
        kept = fmt.decode(fmt.encode(x))
        assert torch.equal(kept[0, ::2], clean[0, ::2])
        if not isinstance(fmt, LogMinMax):
            assert kept[0, 1].isnan().all()
            continue
        roots = fmt.decode_root(fmt.encode(x))
        assert roots.isfinite().all()
        # No step is longer than before: its divisor is an Inf, or nearly one.
        assert kept[0, 1].isinf().all()
        assert float(roots[0, 1, 5]) > 2.0**126


@pytest.mark.parametrize("fmt", [f for f in SIGNED if isinstance(f, Float)], ids=name_of)
def test_what_is_not_finite_stays_in_its_element(fmt: Format) -> None:
    x = torch.tensor([1.0, float("nan"), -float("inf"), float("inf"), 2.0])
    # What NVIDIA's arithmetic, x86's and uninitialised memory hold.
    patterns = torch.tensor([0x7FFFFFFF, -0x400000, -1, 0x7F800001], dtype=torch.int32)
    x = torch.cat([x, patterns.view(torch.float32)])
    for n in (None, noise(fmt.noise_bits, 0), noise(fmt.noise_bits, (1 << fmt.noise_bits) - 1)):
        kept = fmt.decode(fmt.encode(x, noise=n))
        assert torch.equal(kept.isnan(), x.isnan())
        assert torch.equal(kept[:5].nan_to_num(7.0, 8.0, 9.0), x[:5].nan_to_num(7.0, 8.0, 9.0))


# -- LogMinMax's integers
@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4])
def test_steps_do_not_depend_on_how_a_reciprocal_rounds(bits: int) -> None:
    """Both divisions per block may be off by two ulps and still give the same integers."""
    fmt = LogMinMax(bits, 64)
    fine = 2 ** (22 if bits == 8 else 21)
    for units in range(1, fmt.most + 1):
        k = fmt.cells_of(units)
        quotients = np.float32(2**bits + 0.5) / np.float32(units)
        near = [np.floor(quotients * (1 + d * 2.0**-23)) for d in (-2, -1, 0, 1, 2)]
        assert {min(255, int(x)) for x in near} == {k} == {int(fmt.cells(torch.tensor(units, dtype=torch.int32)))}
        steps = {int(np.rint(np.float32(fine) / np.float32(k) * (1 + d * 2.0**-23))) for d in (-1, 0, 1)}
        assert steps == {int(fmt.step(torch.tensor(k, dtype=torch.int32))) >> (fmt.unit - (22 if bits == 8 else 21))}


@pytest.mark.parametrize("bits", [7, 6, 5, 4])
def test_a_block_within_a_unit_has_its_cells_for_itself(bits: int) -> None:
    """The margin for what noise may do to an end is half a cell of the block, were it two units wider, and no more."""
    fmt = LogMinMax(bits, 64)
    half = 2.0**fmt.unit / (2 * (2**bits // 3))
    start = 127 << 23
    for inside, units in ((half + 8, 1), (half - 8, 2)):
        for pattern in (start + int(inside), start + 2**fmt.unit - int(inside)):
            value = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
            parts = fmt.encode(value.square().expand(1, 1, 64), noise=noise(fmt.noise_bits, 0))
            assert int(parts["range"]) & 0xFF == 2**bits // units, (inside, pattern - start)


def test_no_element_of_8_bits_is_thought_to_be_raised_within_the_span_of_its_codes() -> None:
    """The enclosure of a block from a little above 1 on, whose codes begin a unit below 1 for the margin."""
    fmt, root = LogMinMax(8, 64), torch.linspace(1.001, 2, 64).view(1, 64)
    inside = fmt.enclose(Interval.point(root.square()), BlockView(root.shape))
    assert (inside.hi <= root.double().square() * (1 + fmt.bound(4).total) ** 2 * (1 + 4 * ROUNDOFF)).all()


# -- weights
@each_master
@each_narrow
@given(seed=st.integers(0, 2**32 - 1))
def test_weights_are_kept_within_the_derived_bound(master: Master, param: dtypes.DType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    low, high = (-126.0, 127.0) if param is dtypes.bf16 else (-14.0, 15.9)
    x = (rng.choice([-1, 1], 512) * 2.0 ** rng.uniform(low, high, 512)).astype(np.float32)
    x[:256] = np.ldexp(1 + rng.integers(-3, 4, 256) * 2.0**-18, rng.integers(int(low) + 1, int(high), 256))
    weight = torch.from_numpy(x)
    count = master.noise_bits(param)
    drawn = noise(count, words(tuple(weight.shape), seed % 1000) & ((1 << count) - 1)) if count else None
    parts = master.encode(weight, param, noise=drawn)
    assert {k: v.dtype for k, v in parts.items()} == {
        k: getattr(torch, f.dtype.torch) for k, f in master.fields(param).items()
    }
    kept = master.decode(parts, param).double()
    bound = master_bound(master, param)
    assert ((kept - weight.double()).abs() <= bound.total * weight.double().abs()).all()


@each_master
@each_narrow
def test_the_visible_weight_is_a_rounding_of_the_kept_one(master: Master, param: dtypes.DType) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    visible = master.encode(x, param)[""]
    last = {"bf16": 8, "f16": 11}[param.name]
    # Half a place, and half of what the split keeps below it: near ties the split rounds twice.
    slack = 2.0**-8 if isinstance(master, Split) and master.bits == 8 else 0.0
    assert ((visible.double() - x.double()).abs() <= x.double().abs() * 2.0**-last * (1 + slack)).all()


# -- FlashOptim's numbers, by its published formulas in numpy
def flash_quantize(x: np.ndarray, *, moment: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes, fp16 scales) of rows of 32: absolute maximum, softsign (or a root), halves up."""
    one, two, half = np.float32(1), np.float32(2), np.float32(0.5)
    top = np.float32(127 if moment else 255)
    x = x if moment else np.sqrt(x)
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12))
    n = x / scale
    y = two * n / (one + np.abs(n)) if moment else n
    return np.floor(y * top + half), scale.astype(np.float16)


def flash_dequantize(codes: np.ndarray, scale: np.ndarray, *, moment: bool) -> np.ndarray:
    y = codes.astype(np.float32) / np.float32(127 if moment else 255)
    n = y / (np.float32(2) - np.abs(y)) if moment else y
    x = n * scale.astype(np.float32)
    return x if moment else x * x


@pytest.mark.parametrize("moment", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-9, 1e4])
def test_flashoptim_states_are_its_own_bit_for_bit(moment: bool, size: float) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((500, 1, 32)) * size).astype(np.float32)
    x = x if moment else x * x
    fmt = plans.flashoptim.signed if moment else plans.flashoptim.nonneg
    parts = fmt.encode(torch.from_numpy(x))
    codes, scale = flash_quantize(x, moment=moment)
    assert np.array_equal(parts[""].numpy().astype(int) - (128 if moment else 0), codes.astype(int))
    assert np.array_equal(parts["scale"].numpy(), scale)
    assert np.array_equal(fmt.decode(parts).numpy(), flash_dequantize(codes, scale, moment=moment))


def flash_exponent(weight: np.ndarray, param: dtypes.DType) -> np.ndarray:
    """log2 of half an ulp of the narrow weight."""
    stored, least = (7, -126) if param is dtypes.bf16 else (10, -14)
    exponent = np.frexp(np.abs(weight.astype(np.float64)))[1] - 1
    return np.where(weight == 0, least, np.maximum(exponent, least)) - stored - 1


@each_narrow
def test_flashoptim_weights_are_its_own_bit_for_bit(param: dtypes.DType) -> None:
    rng = np.random.default_rng(4)
    high = 60 if param is dtypes.bf16 else 15
    x = (rng.standard_normal(20000) * 2.0 ** rng.uniform(-40, high, 20000)).astype(np.float32)
    x = np.clip(x, -65000, 65000) if param is dtypes.f16 else x
    narrow = torch.from_numpy(x).to(getattr(torch, param.torch))
    weight = narrow.float().numpy()
    exponent = flash_exponent(weight, param)
    units = np.clip(np.ldexp((x - weight).astype(np.float64), -exponent), -1, 1).astype(np.float32) * np.float32(127)
    codes = np.copysign(np.floor(np.abs(units) + np.float32(0.5)), units)
    parts = Ecc8().encode(torch.from_numpy(x), param)
    assert torch.equal(bits(parts[""]), bits(narrow))
    assert np.array_equal(parts["low"].numpy().astype(int) - 128, codes.astype(int))
    error = np.ldexp((codes.astype(np.float32) / np.float32(127)).astype(np.float64), exponent).astype(np.float32)
    assert np.array_equal(Ecc8().decode(parts, param).numpy(), weight + error)


# -- scales, noise, and what is refused
@pytest.mark.parametrize("scale", SCALES, ids=str)
@given(pattern=st.integers(0, 0x7F7FFFFF))
def test_scales_are_rounded_up_and_what_the_encoder_divides_by(scale: Scale, pattern: int) -> None:
    top = torch.tensor([pattern], dtype=torch.int32)
    if scale is ue7m9:
        top = top.view(torch.float32).clamp(max=scale.high).view(torch.int32)
    stored, divisor = scale.encode(top)
    assert torch.equal(scale.decode(stored), divisor)
    again = scale.encode(divisor.view(torch.int32))[0]
    assert torch.equal(bits(again), bits(stored))
    x, s = top.view(torch.float32).double(), divisor.double()
    low, high, excess = scale.low, scale.high, scale.excess
    assert (s >= x.clamp(max=high)).all()
    assert (s <= x.clamp(min=low) * (1 + excess)).all()


def test_noise_is_centred_on_its_cells() -> None:
    every = Noise(torch.arange(1 << 12, dtype=torch.int32) << 7, 7, 12)
    for width in (12, 24):
        mean = every.fraction(width).double().mean() / 2.0**width
        assert abs(float(mean) - 0.5) <= 2.0 ** -(width + 1)


@pytest.mark.parametrize(("shift", "width"), [(24, 9), (7, 9), (7, 13)])
def test_midpoints_of_noise_are_centred_and_read_its_own_bits_alone(shift: int, width: int) -> None:
    own = torch.arange(256, dtype=torch.int64) << shift
    around = own | ((1 << shift) - 1) | (-1 << shift + 8)
    for word in (own, around):
        middle = Noise(word.to(torch.int32), shift, 8).middle(width)
        assert middle.tolist() == [(2 * k + 1) << width - 9 for k in range(256)]


@pytest.mark.parametrize(
    ("param", "exponent"),
    [(dtypes.f16, e) for e in (-35, -30, -24, -18, -17, -16, -15, -14, -13, 3)] + [(dtypes.bf16, 3)],
)
def test_all_noise_together_keeps_the_mean_of_a_split_weight(param: dtypes.DType, exponent: int) -> None:
    """To half of the 256th part of its last place, below the smallest normal f16 too."""
    x = torch.logspace(exponent, exponent + 1, 101, base=2.0, dtype=torch.float64)[:-1].float()
    master = Split(8, "stochastic")
    word = torch.arange(256, dtype=torch.int64) << 24
    noise = Noise(word.to(torch.int32)[:, None].expand(256, len(x)), 24, 8)
    kept = master.decode(master.encode(x.expand(256, -1), param, noise=noise), param).double()
    place = 2.0 ** (max(exponent, -14) - param.mantissa - 8)
    assert (kept.mean(0) - x.double()).abs().max() <= place / 512
    assert ((kept - x.double()).abs() < place).all()


def test_every_value_of_the_word_outside_its_bits_is_ignored() -> None:
    inside = Noise(torch.tensor([0b1010_1100_0000], dtype=torch.int32), 6, 6)
    around = Noise(torch.tensor([0b1010_1100_0000 | 0x3F | (-1 << 12)], dtype=torch.int32), 6, 6)
    assert int(inside.integer()) == int(around.integer()) == 0b101011


@pytest.mark.parametrize(
    ("make", "given"),
    [
        *((Blocked, {"bits": bits}) for bits in (1, 9)),
        (Blocked, {"block": 48}),
        (Blocked, {"signed": False, "relative": True}),
        (Blocked, {"scale": ue7m9}),
        *((LogMinMax, more) for more in ({"bits": 3}, {"bits": 9}, {"block": 1})),
        (Split, {"bits": 12}),
        (softsign, {"k": 0}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_formats_that_no_kernel_has_are_refused(make: Any, given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="E305"):
        make(**given)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_a_nan_scale_stays_nan_when_negated_and_carried_into(scale: Scale) -> None:
    """Kernels add up to 2^17 to a weight's pattern; on machines that keep a NaN's payload, that is the scale's."""
    stored, _ = scale.encode(torch.tensor([0x7FC00000, 0x7FFFFFFF], dtype=torch.int32))
    kept = scale.decode(stored)
    assert kept.isnan().all()
    assert ((-kept).view(torch.int32) + ((1 << 17) - 1)).view(torch.float32).isnan().all()


# -- derived bounds beside exact suprema


BOUNDED: list[Format] = []
for rounding in ("nearest", "stochastic"):
    BOUNDED += [Blocked(8, 16, c, ue8m8, rounding=rounding) for c in COMPANDERS]
    BOUNDED += [Blocked(8, 16, softsign(1), fp32, rounding=rounding)]
    BOUNDED += [Blocked(8, 16, linear, s, signed=False, rounding=rounding) for s in (ue7m9, fp32)]
    BOUNDED += [LogMinMax(8, 16, rounding=rounding)]
    BOUNDED += [floats.bf16.rounded(rounding), floats.f16.rounded(rounding)]
BOUNDED += [Codebook(codebooks.dynamic(True, 4), 4, 16), Codebook(codebooks.linear_nozero(), 4, 16, ue8m8)]
BOUNDED += [Fp8(kind, 16) for kind in ("e4m3", "e5m2")] + [Rank1(b) for b in (2, 3, 4, 8)]
BOUNDED += [Codebook(codebooks.dynamic(), 8, 16, ties="down")]
BOUNDED += [Codebook((-0.9, -0.5, 0.0, 0.125, 0.5), 3, 16)]  # 1 is far beyond its end
BOUNDED += [Blocked(8, 16, softsign(1), fp16, rounding="nearest")]
BOUNDED += [Blocked(8, 16, linear, fp16, signed=False, rounding="nearest")]


@pytest.mark.parametrize("fmt", BOUNDED, ids=lambda f: str(f).replace(" ", "-"))
def test_the_bound_is_the_exact_supremum_within_a_thousandth(fmt: Format) -> None:
    certificate = certify(fmt)
    assert certificate.ratio == pytest.approx(1, abs=1e-3)
    assert certificate.supremum <= certificate.bound.total


# -- over many steps
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


def test_slow_averages_have_no_steady_bound_to_nearest() -> None:
    assert steady_state(LogMinMax(8, 64, rounding="nearest"), 0.999).high == float("inf")
    assert steady_state(floats.bf16, 0.999).high == float("inf")
    assert steady_state(floats.bf16, 0.95).high < 1.1
    assert steady_state(LogMinMax(8, 64, rounding="stochastic"), 0.999).rms == pytest.approx(0.353, rel=0.03)
