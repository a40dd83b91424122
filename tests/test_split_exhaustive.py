"""Split weights over all 2^32 patterns of f32: every one in the slow test, every 4099th and all edges daily.

The daily test checks the formats as eager torch reads them.  The slow one compiles the same formats, and the same
properties, to a C++ kernel that counts elements instead of reading them: 2^32 of them in half a minute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from optgen import passes
from optgen.backends.cpp import STORED, CppPrinter, Phases, assigned, stored
from optgen.formats import Noise, Split
from optgen.ir import node as ir
from optgen.ir.program import Buffer, Program, Schedule, Store
from optgen.lang.values import Value, bitcast, cast, equal, lift, lshr, where
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType, bf16, f16
from optgen.runtime.cpu import native
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


def smallest_normal(param: DType) -> float:
    return 2.0**-126 if param is bf16 else 2.0**-14


def last_held(split: Split, param: DType) -> float:
    """What 8 more bits of the last binade, half a step further (a whole one with noise), still hold."""
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


AT_ONCE = 1 << 20  # elements per call: what they leave behind fits the cache


def source(schedule: Schedule) -> str:
    """The C++ text of a function that computes AT_ONCE elements of a schedule, of these buffers."""
    plan = Phases(schedule)
    printer = CppPrinter(plan)
    lines = [assigned(plan, let, printer)[0] for let in plan.phases[0].elements]
    lines += [stored(plan, s, printer, "i") for s in schedule.sweep.stores]
    given = ", ".join(f"{STORED[t.name]} *{name}_at" for name, t in FOUND.items())
    export = 'extern "C" __attribute__((visibility("default")))'
    return "\n".join(
        [
            '#include "optgen.h"',
            f"{export} const char *optgen_stamp() {{ return OPTGEN_STAMP; }}",
            f"{export} void split({given}, int32_t stream_key) {{",
            "    const int32_t first = 0;",
            "#pragma omp parallel for",
            f"    for (int i = 0; i < {AT_ONCE}; i += W) {{",
            *(f"        {line}" for line in lines),
            "    }",
            "}",
            "",
        ]
    )


class Compiled:
    """`check`'s properties of the patterns start, start + 1, ..., AT_ONCE of them, as one strict kernel."""

    def __init__(self, split: Split, param: DType, word: int | None) -> None:
        f32, i32, u8 = dtypes.f32, dtypes.i32, dtypes.u8
        buffers = tuple(Buffer(name, t, spaces.elem, "state", name, reads=False) for name, t in FOUND.items())
        pattern = Value(ir.op("add", ir.index(), ir.key("stream_key")))
        x = bitcast(pattern, f32)
        # The same word for all elements, and yet one that depends on them: `index` is never negative here.
        noise = None if word is None else Noise(lshr(Value(ir.index()), 31) + word, 0, 8)
        kept = split.encode(x, param, noise=noise)
        y = split.decode(kept, param)
        again = split.encode(y, param, noise=noise)
        nan, size = ~equal(x, x), abs(x)
        high, high_again = (cast(bitcast(k[""], dtypes.i16), i32) for k in (kept, again))
        low, low_again = (cast(k["low"], i32) for k in (kept, again))
        stored = cast(kept[""], f32)
        inside = size <= last_held(split, param)
        faults = [
            ~nan & ~equal(y, y),
            nan & equal(y, y),
            ~nan & ~equal(stored, stored),
            nan & equal(stored, stored),
            ~nan & ~(equal(high, high_again) & equal(low, low_again)),
            ~nan & ((bitcast(y, i32) ^ pattern) < 0),
            equal(size, float("inf")) & ~equal(y, x),
            inside & (abs(y) > FINITE),
        ]
        if param is bf16 and split.bits == 16:
            faults.append(~nan & ~equal(bitcast(y, i32), pattern))
        bad = faults[0]
        for fault in faults[1:]:
            bad = bad | fault
        error = abs(y - x)
        normal = inside & (size >= smallest_normal(param))
        stores = {
            "bad": cast(cast(bad, i32), u8),
            "ratio": where(normal, error / size, 0.0),
            "tiny": where(inside & (size < smallest_normal(param)), error, 0.0),
        }
        program = Program("split", buffers, (), (), tuple(Store(k, lift(v)) for k, v in stores.items()), "strict")
        (library,) = native.load([native.Job("split", source(passes.run(program, "strict")))])
        assert isinstance(library, ctypes.CDLL), library
        self.step = library.split
        self.out = {name: torch.empty(AT_ONCE, dtype=getattr(torch, t.torch)) for name, t in FOUND.items()}

    def run(self, start: int) -> dict[str, Tensor]:
        self.step(*(ctypes.c_void_p(t.data_ptr()) for t in self.out.values()), ctypes.c_int32(start))
        return self.out


FOUND = {"bad": dtypes.u8, "ratio": dtypes.f32, "tiny": dtypes.f32}
FINITE = float(torch.finfo(torch.float32).max)


@pytest.mark.slow
@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
@each_case
def test_split_on_every_pattern(split: Split, param: DType, word: int | None) -> None:
    kernel = Compiled(split, param, word)
    worst = tiny = 0.0
    for start in range(-(2**31), 2**31, AT_ONCE):
        found = kernel.run(start)
        assert not found["bad"].any(), f"one of the {AT_ONCE} patterns from {start & 0xFFFFFFFF:#x} on"
        worst, tiny = max(worst, float(found["ratio"].max())), max(tiny, float(found["tiny"].max()))
    share = 0.5 if word is None else 1.0
    assert tiny <= share * last_step(split, param)
    bound = master_bound(split, param)
    assert worst <= bound.total
    # The largest error stands just above a power of two, by as much as itself: so far is the bound from it.
    if word == 0:  # every bit that is dropped was set: all but one of the smallest steps
        dropped = (16 if param is bf16 else 13) - split.bits
        assert worst == pytest.approx(bound.value * (1 - 2.0**-dropped), rel=1.01 * bound.value)
    elif word is None and bound.value:
        assert worst == pytest.approx(bound.value, rel=1.01 * bound.value)


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
def test_the_compiled_check_can_fail() -> None:
    """Held to half of its bound, a split has patterns that break it: the kernel sees them."""
    found = Compiled(Split(8, "nearest"), bf16, None).run(0x3F800000)
    assert not found["bad"].any()
    assert master_bound(Split(8, "nearest"), bf16).total / 2 < float(found["ratio"].max())
