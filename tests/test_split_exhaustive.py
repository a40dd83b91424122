"""Split weights over all 2^32 patterns of f32: every one in the slow test, every 4099th and all edges daily."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optgen.formats import Noise, Split
from optgen.ops.dtypes import DType, bf16, f16
from optgen.verify.bounds import master_bound

CHUNK = 1 << 17  # fits the cache
# Ends of binades, of subnormals, of what rounds to Inf, of NaN; of f32, bf16 and f16.
EDGES = (0, 0x00800000, 0x33000000, 0x33800000, 0x38800000, 0x3F800000, 0x477FE000, 0x477FF000, 0x47800000)
EDGES += (0x7F7F8000, 0x7F7FFF00, 0x7F800000, 0x7FC00000, 0x7FFFFFFF)

each_case = pytest.mark.parametrize(
    ("split", "param", "word"),
    [
        (Split(8, "nearest"), bf16, None),
        (Split(8), bf16, 0),
        (Split(8), bf16, 255),
        (Split(16), bf16, None),
        (Split(8, "nearest"), f16, None),
        (Split(8), f16, 0),
        (Split(8), f16, 255),
        (Split(16), f16, None),
    ],
    ids=lambda x: str(x),
)


def some_patterns() -> Iterator[Tensor]:
    strided = torch.arange(-(2**31), 2**31, 4099)
    around = torch.tensor([e + d for e in EDGES for d in range(-600, 601)])
    edges = torch.cat([around, around | 0x80000000])
    yield from torch.cat([strided, (edges + 2**31) % 2**32 - 2**31]).to(torch.int32).split(CHUNK)


def all_patterns() -> Iterator[Tensor]:
    for start in range(-(2**31), 2**31, CHUNK):
        yield torch.arange(start, start + CHUNK).to(torch.int32)


def check(split: Split, param: DType, word: int | None, patterns: Iterator[Tensor]) -> float:
    """Asserts every property; returns the worst relative error of a normal value."""
    noise = None if word is None else Noise(torch.full((), word, dtype=torch.int32), 0, 8)
    smallest = 2.0**-126 if param is bf16 else 2.0**-14
    # What 8 more bits of the last binade, half a step further (a whole one with noise), still hold.
    last = 2.0**127 * (2 - 2.0**-15) if param is bf16 else 2.0**15 * (2 - 2.0 ** -min(10 + split.bits, 23))
    step = {8: 2.0**-141, 16: 2.0**-149} if param is bf16 else {8: 2.0**-32, 16: 2.0**-40}
    share = 0.5 if word is None else 1.0
    worst = 0.0
    for part in patterns:
        x = part.view(torch.float32)
        kept = split.encode(x, param, noise=noise)
        y = split.decode(kept, param)
        again = split.encode(y, param, noise=noise)
        nan, size = x.isnan(), x.abs()
        high, high_again = kept[""].view(torch.int16), again[""].view(torch.int16)
        assert torch.equal(y.isnan(), nan)
        assert torch.equal(kept[""].isnan(), nan)
        assert (nan | ((high == high_again) & (kept["low"] == again["low"]))).all()
        assert (nan | ((y.view(torch.int32) ^ part) >= 0)).all()
        assert ((size != float("inf")) | (y == x)).all()
        inside = size <= last
        assert (y.isfinite() | ~inside).all()
        if param is bf16 and split.bits == 16:
            assert (nan | (y.view(torch.int32) == part)).all()
        # Two f32 within a factor of 2 have an exact difference; so have subnormals.
        error = torch.where(inside, y - x, 0.0).abs()
        normal = inside & (size >= smallest)
        worst = max(worst, float(torch.where(normal, error / size, 0.0).max()))
        assert float(torch.where(normal, 0.0, error).max()) <= share * step[split.bits]
    assert worst <= master_bound(split, param).total
    return worst


@each_case
def test_split_on_a_stride_and_around_every_edge(split: Split, param: DType, word: int | None) -> None:
    check(split, param, word, some_patterns())


@pytest.mark.slow
@each_case
def test_split_on_every_pattern(split: Split, param: DType, word: int | None) -> None:
    worst = check(split, param, word, all_patterns())
    bound = master_bound(split, param).value
    if word in (None, 0):
        assert worst == pytest.approx(bound, rel=2.0**-7)


def test_split_stochastic_mean_is_the_weight() -> None:
    """Over its 256 noise values the kept weight averages to the weight itself, exactly."""
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    for param in (bf16, f16):
        total = torch.zeros(1024, dtype=torch.float64)
        for word in range(256):
            noise = Noise(torch.full((), word, dtype=torch.int32), 0, 8)
            total += Split(8).decode(Split(8).encode(x, param, noise=noise), param).double()
        # f16 drops 5 bits of f32 and draws as many, with their smallest outcome at 0: the mean is exact as well.
        normal = x.abs() >= 2.0**-14
        assert torch.equal((total / 256)[normal], x.double()[normal])
