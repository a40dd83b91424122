"""The meaning of PTX instructions, one row each, over NumPy arrays with an entry per thread.

Registers hold raw bits (bool, uint16 ... uint64). A row names the types in which its operands are seen and its result
is given; an opcode without a row is an error. Sources: the PTX ISA, sections 9.7.1 to 9.7.9; NaN results of fp32 are
0x7fffffff. Approximate instructions give a neighbour of the nearest float, which one is decided by its bits: a kernel
that must not contain any is noticed to contain one, and its error stays within what the ISA allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: dict[str, Any] = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16}
DTYPES |= {f"{kind}{n}": np.dtype(f"u{n // 8}") for kind in "ub" for n in (8, 16, 32, 64)}
DTYPES |= {f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)}
BITS = {1: np.dtype(np.bool_)} | {n: np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)}
"""Width of a register in bits -> the dtype in which it is kept."""

_NAN = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}
_WIDER = {np.dtype(f"{k}{n}"): np.dtype(f"{k}{2 * n}") for k in "ui" for n in (1, 2, 4)}


class PTXError(Exception):
    """What a device would not do, or this emulator cannot."""


@dataclass(frozen=True)
class Row:
    """One instruction: the types of its operands and of its result, its function, and the modifier .ftz."""

    takes: tuple[str, ...]
    gives: str
    function: Callable[..., Array]
    flushes: bool = False

    def __call__(self, *operands: Array) -> Array:
        if not self.flushes:
            return self.function(*operands)
        return flushed(self.function(*(flushed(x) for x in operands)))


TABLE: dict[str, Row] = {}
"""Opcode, without .ftz -> its row."""


def find(opcode: str) -> Row:
    """Return the row of an opcode; raises PTXError if there is none."""
    plain = opcode.replace(".ftz", "")
    if plain not in TABLE and plain.startswith("cvt."):
        TABLE[plain] = _conversion(plain)
    row = TABLE.get(plain)
    if row is None or (plain != opcode and row.takes[0] != "f32"):
        raise PTXError(f"unknown instruction {opcode}")
    return row if plain == opcode else Row(row.takes, row.gives, row.function, True)


def rows(names: str, types: str, function: Callable[..., Array], takes: str = "t t", gives: str = "t") -> None:
    """Add a row for each name and type; "t" stands for the type, "2t" for the integer type of twice the width."""
    for name in names.split():
        for t in types.split():
            seen = {"t": t} if t in ("f32", "f64", "pred") else {"t": t, "2t": f"{t[0]}{2 * int(t[1:])}"}
            row = Row(tuple(seen.get(x, x) for x in takes.split()), seen.get(gives, gives), function)
            TABLE[f"{name}.{t}"] = row


# Helpers --------------------------------------------------------------------------------------------------------------


def raw(x: Array) -> Array:
    """Return the bits of a result; a NaN of arithmetic has those of the device."""
    if x.dtype.kind == "f":
        bits = x.view(BITS[8 * x.itemsize])
        return np.where(np.isnan(x), bits.dtype.type(_NAN[x.itemsize]), bits)
    return x.view(BITS[8 * x.itemsize]) if x.dtype.kind == "i" else x


def flushed(x: Array) -> Array:
    """Return fp32 with subnormals as zeros of their sign; other dtypes as they are."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of fp32, rounded once: the product is exact in fp64, the sum is rounded to odd there."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    moved = total - product
    error = (product - (total - moved)) + (c - moved)
    bits = total.view(np.int64)
    odd = bits + np.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total) & np.isfinite(error)
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def approximately(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return an instruction whose result is off by a unit in the last place, unless the exact one is a float."""

    def approximate(*operands: Array) -> Array:
        exact = function(*(x.astype(np.float64) for x in operands))
        near = exact.astype(np.float32)
        bits = near.view(np.int32)
        off = np.where((bits ^ (bits >> 3)) & 1, 1, -1).astype(np.int32)
        kept = (near == exact) | ~np.isfinite(near) | (near == 0)
        return np.where(kept, bits, bits + off).view(np.float32)

    return approximate


def _extreme(larger: bool, keeps_nan: bool) -> Callable[[Array, Array], Array]:
    """min and max of fp32: -0 is less than +0; a NaN loses, or wins with .NaN."""

    def extreme(a: Array, b: Array) -> Array:
        below = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
        found = np.where(below, b, a) if larger else np.where(below, a, b)
        if keeps_nan:
            return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), found)
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, found))

    return extreme


def _quotient(a: Array, b: Array) -> Array:
    """Division towards zero; by zero all bits are set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~np.zeros_like(a), quotient).astype(a.dtype)


def _shifted(a: Array, by: Array, left: bool) -> Array:
    """A shift; by the width or more nothing is left but, of a signed number to the right, copies of its sign."""
    width = 8 * a.itemsize
    small = np.minimum(by, width - 1).astype(a.dtype)
    if left:
        return np.where(by >= width, a.dtype.type(0), a << small)
    return np.where((by >= width) & (a.dtype.kind != "i"), a.dtype.type(0), a >> small)


def _funnel(left: bool) -> Callable[[Array, Array, Array], Array]:
    def funnel(low: Array, high: Array, by: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        count = (by & np.uint32(31)).astype(np.uint64)
        return ((both << count) >> np.uint64(32) if left else both >> count).astype(np.uint32)

    return funnel


def _permuted(a: Array, b: Array, selectors: Array) -> Array:
    """prmt: four bytes of eight, or copies of their signs."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    out = np.zeros(np.broadcast_shapes(both.shape, selectors.shape), np.uint32)
    for k in range(4):
        select = (selectors >> np.uint32(4 * k)) & np.uint32(15)
        byte = ((both >> ((select & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(select & np.uint32(8), np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * k)
    return out


def _extracted(a: Array, position: Array, length: Array) -> Array:
    """bfe: a field of bits; of signed numbers its highest bit is copied upwards."""
    width = 8 * a.itemsize
    position, length = np.minimum(position & 255, width), np.minimum(length & 255, width)
    up = np.maximum(width - position.astype(np.int64) - length, 0).astype(np.uint32)
    field = _shifted(_shifted(a, up, True), np.minimum(up + position, width).astype(np.uint32), False)
    kept = np.where(length == 0, a.dtype.type(0), field)
    beyond = width - length.astype(np.int64) - position < 0  # fewer bits are left: the field ends with the number
    return np.where(beyond & (length > 0), _shifted(a, position, False), kept)


def _halves(function: Callable[..., Array], dtype: Any) -> Callable[..., Array]:
    """An instruction for both halves of its operands, seen as numbers of a dtype."""
    half = 8 * np.dtype(dtype).itemsize

    def both(*operands: Array) -> Array:
        wide, narrow = operands[0].dtype, BITS[half]
        parts = [
            raw(np.asarray(function(*((x >> wide.type(by)).astype(narrow).view(dtype) for x in operands))))
            for by in (0, half)
        ]
        return parts[0].astype(wide) | (parts[1].astype(wide) << wide.type(half))

    return both


def nearest_bf16(x: Array) -> Array:
    """bf16 bits of fp32, to nearest even; NaN is 0x7fff."""
    bits = x.view(np.uint32).astype(np.uint64)
    found = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), found)


def _cut_bf16(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint16(0x7FFF), (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


def _cut_f16(x: Array) -> Array:
    """f16 bits of fp32, towards zero; NaN is 0x7fff."""
    near = x.astype(np.float16)
    return raw(near) - (np.abs(near) > np.abs(x)).astype(np.uint16)


# Conversions ----------------------------------------------------------------------------------------------------------

_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_HALVES: dict[tuple[str, str], Callable[[Array], Array]] = {
    ("bf16", "rn"): nearest_bf16,
    ("bf16", "rz"): _cut_bf16,
    ("f16", "rn"): lambda x: raw(x.astype(np.float16)),
    ("f16", "rz"): _cut_f16,
}  # of fp32, as bits


def _nearest(dtype: torch.dtype) -> Callable[[Array], Array]:
    """Return the conversion of fp32 to bytes by torch's, saturated; a NaN is 0x7f, as in NVIDIA's cuda_fp8.hpp."""
    most = torch.finfo(dtype).max

    def codes(x: Array) -> Array:
        found = torch.from_numpy(np.clip(x, -most, most)).to(dtype).view(torch.uint8).numpy()
        return np.where(np.isnan(x), np.uint8(0x7F), found).astype(np.uint16)

    return codes


_BYTES = {"e4m3x2": _nearest(torch.float8_e4m3fn), "e5m2x2": _nearest(torch.float8_e5m2)}
_FLOATS: dict[tuple[str, str, str], Callable[[Array], Array]] = {
    ("f16", "f32", ""): lambda x: x.astype(np.float32),
    ("bf16", "f32", ""): lambda x: x.astype(np.uint32) << np.uint32(16),
    ("f32", "f64", ""): lambda x: x.astype(np.float64),
    ("f64", "f32", "rn"): lambda x: x.astype(np.float32),
}  # from, to, rounding


def _conversion(opcode: str) -> Row:
    """Return the row of `cvt[.rounding].to.from`."""
    _, *rounding, to, source = opcode.split(".")
    how = ".".join(rounding)
    floats = [t.startswith(("f", "bf")) for t in (source, to)]
    if source == "f32" and (half := _HALVES.get((to.removesuffix("x2"), how))):
        if not to.endswith("x2"):
            return Row((source,), "b16", half)
        return Row((source, source), "b32", lambda a, b: (half(a).astype(np.uint32) << np.uint32(16)) | half(b))
    if source == "f32" and how == "rn.satfinite" and to in _BYTES:
        return Row((source, source), "b16", lambda a, b: (_BYTES[to](a) << np.uint16(8)) | _BYTES[to](b))
    if (source, to, how) in _FLOATS:
        given = ("b16", "b32") if source == "bf16" else (source, to)
        return Row((given[0],), given[1], _FLOATS[source, to, how])
    if (source, to) == ("f32", "f32") and how in _WHOLE:
        return Row((source,), to, _WHOLE[how])
    if floats == [True, False] and source in ("f32", "f64") and how in _WHOLE:
        return Row((source,), to, lambda x: _integers(_WHOLE[how](x.astype(np.float64)), DTYPES[to], source))
    if floats == [False, True] and to in ("f32", "f64") and how == "rn":
        return Row((source,), to, lambda x: x.astype(DTYPES[to]))
    if floats == [False, False] and not how:
        return Row((source,), to, lambda x: x.astype(DTYPES[to]))
    raise PTXError(f"unknown conversion {opcode}")


def _integers(x: Array, dtype: Any, source: str) -> Array:
    """fp64 whole numbers as integers: the nearest one that there is; NaN is 0, or the sign bit alone (ISA 9.7.9.22)."""
    info, nan = np.iinfo(dtype), np.isnan(x)
    low, high = x <= float(info.min), x >= float(info.max)
    found = np.where(nan | low | high, 0.0, x).astype(dtype)
    found = np.where(high, dtype.type(info.max), np.where(low, dtype.type(info.min), found))
    of_nan = 0 if source == "f32" and dtype.itemsize < 8 else 1 << (8 * dtype.itemsize - 1)
    return np.where(nan, np.array(of_nan, np.uint64).astype(BITS[8 * dtype.itemsize]).view(dtype), found)


# The table ------------------------------------------------------------------------------------------------------------

_INTS = "u16 s16 u32 s32 u64 s64"
_WORDS = "b16 b32 b64"
rows("add add.rn", "f32 f64", lambda a, b: a + b)
rows("sub sub.rn", "f32 f64", lambda a, b: a - b)
rows("mul mul.rn", "f32 f64", lambda a, b: a * b)
rows("div.rn", "f32 f64", lambda a, b: a / b)
rows("sqrt.rn", "f32 f64", np.sqrt, "t")
rows("rcp.rn", "f32 f64", lambda a: a.dtype.type(1) / a, "t")
rows("fma.rn", "f32", fused, "t t t")
rows("div.full div.approx", "f32", approximately(lambda a, b: a / b))
rows("sqrt.approx", "f32", approximately(np.sqrt), "t")
rows("rcp.approx", "f32", approximately(lambda a: 1 / a), "t")
rows("rsqrt.approx", "f32", approximately(lambda a: 1 / np.sqrt(a)), "t")
rows("ex2.approx", "f32", approximately(np.exp2), "t")
rows("lg2.approx", "f32", approximately(np.log2), "t")
rows("sin.approx", "f32", approximately(np.sin), "t")
rows("cos.approx", "f32", approximately(np.cos), "t")
rows("tanh.approx", "f32", approximately(np.tanh), "t")
rows("neg", "f32", lambda a: a ^ np.uint32(0x80000000), "b32", "b32")
rows("abs", "f32", lambda a: a & np.uint32(0x7FFFFFFF), "b32", "b32")
rows("copysign", "f32", lambda a, b: (b & np.uint32(0x7FFFFFFF)) | (a & np.uint32(0x80000000)), "b32 b32", "b32")
rows("min", "f32", _extreme(False, False))
rows("max", "f32", _extreme(True, False))
rows("min.NaN", "f32", _extreme(False, True))
rows("max.NaN", "f32", _extreme(True, True))
rows("add", _INTS, lambda a, b: a + b)
rows("sub", _INTS, lambda a, b: a - b)
rows("mul.lo", _INTS, lambda a, b: a * b)
rows("mad.lo", _INTS, lambda a, b, c: a * b + c, "t t t")
rows("mul.wide", "u16 s16 u32 s32", lambda a, b: a.astype(_WIDER[a.dtype]) * b, gives="2t")
rows("mad.wide", "u16 s16 u32 s32", lambda a, b, c: a.astype(_WIDER[a.dtype]) * b + c, "t t 2t", "2t")
rows("div", _INTS, _quotient)
rows("rem", _INTS, lambda a, b: a - _quotient(a, b) * b)
rows("min", _INTS, np.minimum)
rows("max", _INTS, np.maximum)
rows("min.relu", "s32", lambda a, b: np.maximum(np.minimum(a, b), 0), "t t")
rows("max.relu", "s32", lambda a, b: np.maximum(np.maximum(a, b), 0), "t t")
rows("neg", "s16 s32 s64", lambda a: -a, "t")
rows("abs", "s16 s32 s64", np.abs, "t")
rows("and", f"{_WORDS} pred", lambda a, b: a & b)
rows("or", f"{_WORDS} pred", lambda a, b: a | b)
rows("xor", f"{_WORDS} pred", lambda a, b: a ^ b)
rows("not", f"{_WORDS} pred", lambda a: ~a, "t")
rows("shl", _WORDS, lambda a, by: _shifted(a, by, True), "t u32")
rows("shr", f"{_WORDS} {_INTS}", lambda a, by: _shifted(a, by, False), "t u32")
rows("shf.l.wrap", "b32", _funnel(True), "t t u32")
rows("shf.r.wrap", "b32", _funnel(False), "t t u32")
rows("prmt", "b32", _permuted, "t t t")
rows("bfe", "u32 s32 u64 s64", _extracted, "t u32 u32")
rows("selp", f"{_WORDS} {_INTS}", lambda a, b, c: np.where(c, a, b), "t t pred")
rows("selp", "f32", lambda a, b, c: np.where(c, a, b), "b32 b32 pred", "b32")
rows("mov", f"{_WORDS} {_INTS} pred", lambda a: a, "t")
rows("mov", "f32", lambda a: a, "b32", "b32")
rows("mov", "f64", lambda a: a, "b64", "b64")

for _name, _function in {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}.items():  # fmt: skip
    rows(f"setp.{_name}", f"{_INTS} {_WORDS} f32 f64", _function, gives="pred")
rows("setp.ne", f"{_INTS} {_WORDS}", np.not_equal, gives="pred")
rows("setp.ne", "f32 f64", lambda a, b: (a < b) | (a > b), gives="pred")
rows("setp.neu", "f32 f64", np.not_equal, gives="pred")  # with a NaN these hold
rows("setp.equ", "f32 f64", lambda a, b: ~((a < b) | (a > b)), gives="pred")
rows("setp.ltu", "f32 f64", lambda a, b: ~(a >= b), gives="pred")
rows("setp.leu", "f32 f64", lambda a, b: ~(a > b), gives="pred")
rows("setp.gtu", "f32 f64", lambda a, b: ~(a <= b), gives="pred")
rows("setp.geu", "f32 f64", lambda a, b: ~(a < b), gives="pred")
rows("setp.num", "f32 f64", lambda a, b: ~(np.isnan(a) | np.isnan(b)), gives="pred")
rows("setp.nan", "f32 f64", lambda a, b: np.isnan(a) | np.isnan(b), gives="pred")
for _name, _function in {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}.items():
    rows(f"setp.{_name}", "u16 u32 u64", _function, gives="pred")

for _name, _function in {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}.items():
    TABLE[f"{_name}.s16x2"] = Row(("b32", "b32"), "b32", _halves(_function, np.int16))
    TABLE[f"{_name}.u16x2"] = Row(("b32", "b32"), "b32", _halves(_function, np.uint16))
for _name, _function in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
    TABLE[f"{_name}.f32x2"] = TABLE[f"{_name}.rn.f32x2"] = Row(("b64", "b64"), "b64", _halves(_function, np.float32))
TABLE["fma.rn.f32x2"] = Row(("b64", "b64", "b64"), "b64", _halves(fused, np.float32))


def widened(x: Array, kind: str) -> Array:
    """Narrow floats as fp32."""
    return _FLOATS[kind, "f32", ""](x.view(DTYPES[kind])).view(np.float32)


def _mixed(kind: str, function: Callable[..., Array], last: int = -1) -> Callable[..., Array]:
    """An instruction of fp32 whose first operands are narrow."""
    return lambda *xs: function(*(widened(x, kind) for x in xs[:last]), *xs[last:])


for _kind in ("f16", "bf16"):
    for _name, _function in {"add": np.add, "sub": np.subtract, "fma": fused}.items():  # from sm_100 on
        _narrow = (_kind,) * (2 if _name == "fma" else 1)
        TABLE[f"{_name}.rn.f32.{_kind}"] = Row((*_narrow, "f32"), "f32", _mixed(_kind, _function))
    for _name in [x for x in TABLE if re.fullmatch(r"setp\.\w+\.f32", x)]:
        TABLE[_name.replace("f32", _kind)] = Row((_kind, _kind), "pred", _mixed(_kind, TABLE[_name].function, 2))
