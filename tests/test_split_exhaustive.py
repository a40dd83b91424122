"""Split weights over the patterns of f32: every 4099th and all edges daily, whole binades in the slow test.

Between the binades that the slow test takes, a power of two is a factor of the value, the parts and the error.
"""

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
        (Split(8, "nearest"), bf16, None), (Split(8), bf16, 0), (Split(8), bf16, 255), (Split(16), bf16, None),
        (Split(8, "nearest"), f16, None), (Split(8), f16, 0), (Split(8), f16, 255), (Split(16), f16, None),
    ],
    ids=lambda x: str(x),
)  # fmt: skip


def some_patterns() -> Iterator[Tensor]:
    strided = torch.arange(-(2**31), 2**31, 4099)
    around = torch.tensor([e + d for e in EDGES for d in range(-600, 601)])
    edges = torch.cat([around, around | 0x80000000])
    yield from torch.cat([strided, (edges + 2**31) % 2**32 - 2**31]).to(torch.int32).split(CHUNK)


def smallest_normal(param: DType) -> float:
    return 2.0**-126 if param is bf16 else 2.0**-14


def last_held(split: Split, param: DType) -> float:
    """Return what 8 more bits of the last binade, half a step further (a whole one with noise), still hold."""
    return 2.0**127 * (2 - 2.0**-15) if param is bf16 else 2.0**15 * (2 - 2.0 ** -min(10 + split.bits, 23))


def last_step(split: Split, param: DType) -> float:
    """The distance of two values below the normal numbers."""
    steps = {8: 2.0**-141, 16: 2.0**-149} if param is bf16 else {8: 2.0**-32, 16: 2.0**-40}
    return steps[split.bits]


def check(split: Split, param: DType, word: int | None, patterns: Iterator[Tensor]) -> float:
    """Asserts every property; returns the worst relative error of a normal value."""
    noise = None if word is None else Noise(torch.full((), word, dtype=torch.int32), 0, 8)
    smallest, last = smallest_normal(param), last_held(split, param)
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
        assert float(torch.where(normal, 0.0, error).max()) <= share * last_step(split, param)
    assert worst <= master_bound(split, param).total
    return worst


@each_case
def test_split_on_a_stride_and_around_every_edge(split: Split, param: DType, word: int | None) -> None:
    check(split, param, word, some_patterns())


BINADE = 1 << 23


def whole_binades(param: DType) -> Iterator[Tensor]:
    """Yield both signs of the first, the last and a middle binade of subnormals, of normal numbers, and of Inf and NaN.

    Exponents of f32: 0 are its own subnormals, which bf16 shares; those of f16 begin at 113, and end at 142.
    """
    narrow = (102, 103, 104, 111, 112, 113, 142, 143) if param is f16 else (1, 2, 253)
    for exponent in (0, *narrow, 127, 254, 255):
        for first in (exponent * BINADE, exponent * BINADE - 2**31):
            yield from torch.arange(first, first + BINADE, dtype=torch.int32).split(CHUNK)


@pytest.mark.slow
@each_case
def test_split_on_whole_binades(split: Split, param: DType, word: int | None) -> None:
    worst, bound = check(split, param, word, whole_binades(param)), master_bound(split, param)
    # The largest error stands just above a power of two, by as much as itself: so far is the bound from it.
    if word == 0:  # every bit that is dropped was set: all but one of the smallest steps
        dropped = (16 if param is bf16 else 13) - split.bits
        assert worst == pytest.approx(bound.value * (1 - 2.0**-dropped), rel=1.01 * bound.value)
    elif word is None and bound.value:
        assert worst == pytest.approx(bound.value, rel=1.01 * bound.value)
