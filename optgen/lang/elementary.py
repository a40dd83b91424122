"""Definitions of exp, log, tanh, sigmoid, atan2 and c ** x of elements in core primitives.

Polynomials are minimax fits, their coefficients rounded to fp32 one after the other, the lowest first; each is within
.5 * 2^-24 of the result.  `docs/tools/certify_functions.py` evaluates them at every fp32 number; docs/language.md has
the largest errors.  Fast maths fuses their products, and may take 0 for subnormal operands and results.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from optgen.lang.values import Num, Value, bits, cast, equal, from_bits, maximum, minimum, rint, where
from optgen.lang.values import log as host_log
from optgen.ops.dtypes import f32, i32

_SIGN = -(2**31)
_LN2_HIGH, _LN2_LOW = 0.69314575, 1.4286068e-06  # the first has 16 bits: its products with exponents are exact
_EXP = (0.00138466025, 0.00836832728, 0.0416677184, 0.166665256, 0.49999997)  # of r in (e^r - 1 - r) / r^2
_EXP2 = (0.000153517234, 0.0013390003, 0.00961838197, 0.055503618, 0.240226492, 0.693147182)  # of f in (2^f - 1) / f
_HALF_PI, _HALF_PI_LOW = 1.5707964, -4.371139e-08
_SQRT_HALF = 0x3F3504F3  # the pattern of sqrt(1/2)
_LOG = (0.230142057, 0.285703063, 0.399997503, 0.666666687)  # of z = s^2 in (2 atanh(s) / s - 2) / z
_TANH = (-0.00590648223, 0.0208425652, -0.0538119003, 0.133324832, -0.333333313)  # of x^2 in (tanh(x) / x - 1) / x^2
_ATAN = (
    -0.00196041632, 0.0116852121, -0.0326647833, 0.0595144704, -0.0849952772, 0.109875731, -0.142716765, 0.199993283,
    -0.333333284,
)  # fmt: skip
"""The polynomial of t^2 that is (atan(t) / t - 1) / t^2, t <= 1."""


def horner(x: Num, coefficients: tuple[float, ...]) -> Num:
    """Return the polynomial of x, highest coefficient first."""
    out: Num = coefficients[0]
    for c in coefficients[1:]:
        out = out * x + c
    return out


def finite(x: Num, value: Num) -> Num:
    """Return value where x is below infinity, else x itself, whose bits would be read as those of a number."""
    return where(x <= f32.largest, value, x)


def _with_sign(size: Num, x: Num) -> Num:
    """Return size >= 0 with the sign of x, of -0 too."""
    return from_bits(bits(size) | (bits(x) & _SIGN))


def _parts(x: Num) -> tuple[Num, Num]:
    """Return (e ** r, n as i32) with x = n log(2) + r, |r| <= log(2) / 2."""
    n = rint(x * (1 / math.log(2)))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    return 1.0 + (r + r * r * horner(r, _EXP)), cast(n, i32)


def _near(x: Num) -> Num:
    """Return e ** x of |x| < 80, where neither range ends."""
    mantissa, n = _parts(x)
    return from_bits(bits(mantissa) + (n << 23))


def _scaled(mantissa: Num, n: Num) -> Num:
    """Return mantissa * 2 ** n for n from -252 to 254, by two factors, as it may be subnormal, 0 or an infinity."""
    half = n >> 1
    return mantissa * from_bits((half + 127) << 23) * from_bits((n - half + 127) << 23)


def exp(x: Num) -> Num:
    """Return e ** x: subnormal from -87.34, 0 from -103.98, an infinity from 88.73."""
    return finite(x, _scaled(*_parts(minimum(maximum(x, -105.0), 90.0))))


def log_of_normal(m: Num, raised: Num = False) -> Num:
    """Return the natural logarithm of a positive normal number; where `raised`, of m / 2^23."""
    k = (bits(m) - _SQRT_HALF) >> 23
    f = from_bits(bits(m) - (k << 23)) - 1.0
    s = f / (f + 2.0)
    z = s * s
    half = 0.5 * f * f
    e = cast(k, f32) if raised is False else where(raised, cast(k, f32) - 23.0, cast(k, f32))
    tail = s * (half + z * horner(z, _LOG)) + e * _LN2_LOW
    return e * _LN2_HIGH - ((half - tail) - f)


def log(x: Num) -> Num:
    """Return the natural logarithm: -Inf at 0, NaN below."""
    small = x < f32.normal
    out = finite(x, log_of_normal(where(small, x * 2.0**23, x), small))
    none = where(equal(x, 0.0), from_bits((bits(x) & _SIGN) | -(1 << 23)), from_bits(bits(x) | -(1 << 22)))
    return where(x <= 0.0, none, out)


def raised(base: Num, x: Num) -> Num:
    """Return base ** x of a host scalar above 0, as 2 ** (x log2(base)): exact where base is 2 and x is whole."""
    base = base.node.attr if isinstance(base, Value) and base.node.op == "const" else base
    known = isinstance(base, float) and base > 0
    y = x * (math.log2(base) if known else host_log(base) * (1 / math.log(2)))
    near = minimum(maximum(y, -152.0), 130.0)
    n = rint(near)
    f = near - n
    return finite(y, _scaled(1.0 + f * horner(f, _EXP2), cast(n, i32)))


def tanh(x: Num) -> Num:
    """Return the hyperbolic tangent: an odd polynomial below .625, else 1 - 2 / (e^2x + 1)."""
    a = abs(x)
    z = a * a
    small = a + a * (z * horner(z, _TANH))
    large = 1.0 - 2.0 / (_near(2.0 * minimum(a, 10.0)) + 1.0)
    return _with_sign(where(a >= 0.625, large, small), x)


def sigmoid(x: Num) -> Num:
    """Return 1 / (1 + e^-x), of negative x as e^x / (1 + e^x), so that it is as accurate where it is small."""
    e = exp(-abs(x))
    return where(x < 0.0, e, 1.0) / (1.0 + e)


def atan2(y: Num, x: Num) -> Num:
    """Return the angle of the point (x, y), -pi to pi: of the smaller side over the larger one, then of its octant."""
    a, b = abs(x), abs(y)
    small, large = minimum(a, b), maximum(a, b)
    # Fast maths has 0 for the reciprocal of a number above 2^126, and for subnormal numbers.
    scale = where(large < 2.0**-60, 2.0**64, where(large > 2.0**100, 2.0**-64, 1.0))
    t = small * scale / maximum(large * scale, 2.0**-86)
    t = where(large <= f32.largest, t, where(equal(small, large), 1.0, small * 0.0))
    z = t * t
    out = t + t * (z * horner(z, _ATAN))
    out = where(b > a, (_HALF_PI - out) + _HALF_PI_LOW, out)
    out = where(bits(x) < 0, (2.0 * _HALF_PI - out) + 2.0 * _HALF_PI_LOW, out)
    return _with_sign(out, y)


DEFINITIONS: dict[str, Callable[..., Num]] = {
    "exp": exp, "log": log, "pow": raised, "tanh": tanh, "sigmoid": sigmoid, "atan2": atan2,
}
"""Primitive -> its definition where an operand is no host scalar."""
