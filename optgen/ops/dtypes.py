"""The dtypes of the IR: what a value is computed in and what a buffer holds.

Arithmetic happens in `f32`, `i32` (two's complement, wrapping) and `bool`; `f64` exists in host space
only.  The narrow types are storage: a load is widened before anything is done with it.  u4, u2 and u1 are codes
of states in blocks, packed.
"""

from __future__ import annotations

import struct
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

NumberKind = Literal["float", "int", "uint", "bool"]


@dataclass(frozen=True)
class DType:
    """A scalar type: its short name, its width in bits and its kind; `torch` is the attribute of torch.

    mantissa, lowest  of a float: its stored bits, and the exponent of the smallest normal number
    """

    name: str
    bits: int
    kind: NumberKind
    torch: str
    mantissa: int = 0
    lowest: int = 0

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_int(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def packed(self) -> bool:
        """True if several share a byte: neighbours, the first one in its lowest bits; a row fills whole eights of them,
        which are as many bytes as one has bits."""
        return self.kind == "uint" and self.bits < 8

    @property
    def normal(self) -> float:
        """The smallest normal number of a float."""
        return 2.0**self.lowest

    @property
    def largest(self) -> float:
        """The largest finite number of a float."""
        return (2 - 2.0**-self.mantissa) * 2.0 ** (1 - self.lowest)

    @property
    def bytes(self) -> float:
        return self.bits / 8

    def __repr__(self) -> str:
        return self.name


f64 = DType("f64", 64, "float", "float64", 52, -1022)
f32 = DType("f32", 32, "float", "float32", 23, -126)
bf16 = DType("bf16", 16, "float", "bfloat16", 7, -126)
f16 = DType("f16", 16, "float", "float16", 10, -14)
i64 = DType("i64", 64, "int", "int64")
i32 = DType("i32", 32, "int", "int32")
i16 = DType("i16", 16, "int", "int16")
i8 = DType("i8", 8, "int", "int8")
u8 = DType("u8", 8, "uint", "uint8")
u4 = DType("u4", 4, "uint", "uint8")
u2 = DType("u2", 2, "uint", "uint8")
u1 = DType("u1", 1, "uint", "uint8")
boolean = DType("bool", 1, "bool", "bool")

F32_UNIT = 2.0**-24 * (1 + 2.0**-20)
"""Half an ulp of f32, relative; the excess covers fp64 arithmetic on the ends of an interval."""

ALL = {d.name: d for d in (f64, f32, bf16, f16, i64, i32, i16, i8, u8, u4, u2, u1, boolean)}
FROM_TORCH = {d.torch: d for d in ALL.values() if not d.packed}

PRECISION: ContextVar[Any] = ContextVar("PRECISION", default=None)
"""The torch dtype in which a spec is being evaluated, for numbers that meet no tensor; None elsewhere."""


NAN_LAST = 0x007FFFFF
"""Added to the patterns of f32, this keeps the order of +0 to Inf, and a NaN of either sign becomes less than +0."""


def pattern_of(x: float) -> int:
    """Return the bits of x, rounded to f32, as an i32."""
    return int(struct.unpack("=i", struct.pack("f", x))[0])  # the standard "=f" refuses to pack what becomes inf


def of_pattern(pattern: int) -> float:
    """Return the f32 with these bits."""
    return float(struct.unpack("=f", struct.pack("=i", pattern))[0])


def in_f32(x: float) -> float:
    """Return a number of the host's, rounded to f32: 0 if it is too small, an infinity if it is too large."""
    return of_pattern(pattern_of(x))
