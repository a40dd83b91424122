"""The storage format interface: what every way to keep a number between steps must say.

A format is a frozen dataclass with three methods over `optgen.lang`:

- `fields()`   what is stored: name suffix -> Field; "" alone, of floats, is the state itself, under its name; else it
               is codes, "<state>_codes";
- `encode(x)`  f32 values -> what is stored;
- `decode(..)` what is stored -> f32 values.

From these alone come the bytes per parameter, every backend's kernels, the bounds, and the fuzz tests.
Called with traced values they compile; called with torch tensors of shape (..., blocks, size) they compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from optgen.base.errors import UserError
from optgen.formats import measured
from optgen.formats.bound import Bound
from optgen.ir import node as ir
from optgen.lang.spec import MatrixKind
from optgen.lang.values import Num, Value, lshr, maximum, sqrt, where
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import REDUCTIONS

Severity = Literal["error", "warning", "note"]
FormatFinding = tuple[str, Severity, str]
"""A finding about a format: code, severity, reason (`verify/lint.py`)."""

# The range that a scale or float must at least follow: gradients of large models, squared, and their spikes.
LOW, HIGH = 2.0**-50, 2.0**63

Rounding = Literal["nearest", "stochastic", "auto"]


@dataclass(frozen=True)
class Field:
    """One stored tensor: `per` elements share an entry (1: shape of the parameter); `zero` decodes to 0.

    space   "elem", or for one f32 per row, column, matrix or tensor: "row", "col", "mat", "tensor"
    nonneg  whether its numbers are never negative, as those of scales
    """

    dtype: DType
    per: int = 1
    zero: int | float = 0
    space: str = "elem"
    nonneg: bool = False

    @property
    def bytes_per_param(self) -> float:
        """The bytes that an element takes; an entry of a row's elements or more counts as nothing."""
        return self.dtype.bytes / self.per if self.space == "elem" else 0.0


@dataclass(frozen=True)
class Noise:
    """`bits` uniform random bits per element: `word >> shift` of a 32-bit counter hash (i32)."""

    word: Num
    shift: int
    bits: int

    def integer(self) -> Num:
        """i32, uniform on 0 .. 2^bits - 1."""
        if self.shift + self.bits == 32:
            return lshr(self.word, self.shift) if self.shift else self.word
        return (lshr(self.word, self.shift) if self.shift else self.word) & ((1 << self.bits) - 1)

    def fraction(self, width: int) -> Num:
        """i32, uniform on 0 .. 2^width - 1, `width` >= `bits`: the own bits on top, and below them the word's next.

        Those belong to other fields; they decide only where the own bits leave a tie of 2^-bits.
        """
        if self.shift + self.bits == 32:
            return lshr(self.word, 32 - width)
        if width == self.bits:
            return self.integer()
        return (self.integer() << (width - self.bits)) | (1 << (width - self.bits - 1))

    def middle(self, width: int) -> Num:
        """i32, the midpoints of 2^bits cells of 0 .. 2^width, `width` > `bits`: mean exactly 2^(width - 1)."""
        below = width - self.bits
        if self.shift + self.bits == 32 and below == 1:
            return lshr(self.word, self.shift - 1) | 1  # one operation less
        return (self.integer() << below) | (1 << (below - 1))


class View(Protocol):
    """The blocks and lines of a tensor that is enclosed: each method gives every element that of its own."""

    def largest(self, x: Any, size: int) -> Any:
        """Return the largest of each block of that size; NaN wins."""

    def smallest(self, x: Any, size: int) -> Any:
        """Return the smallest of each block of that size; NaN wins."""

    def of_lines(self, x: Any) -> Any:
        """Return the smaller of the largest x of a row and of a column (rank1.py)."""


class Format(ABC):
    """A way to keep the values of one state between steps.

    `encode` without `noise` rounds to nearest, whatever `rounding` says.

    rounding    "auto" is stochastic until a plan has looked at the state's recurrence (Plan.storage)
    still       whether a number that is stored again and again to nearest stays, whatever its neighbours do meanwhile.
                Codes under a scale do not: one that keeps itself is read under the next step's scale, and follows it
    plus_zero   whether a zero to be encoded must be +0: formats that order values by their bit patterns
    relative    whether values are stored relative to the root of the rule's second moment
    is_float    whether each element is a float of its own, on a grid that never moves
    unrounded   whether `encode_root` gives the root before it is rounded, too
    """

    rounding: Rounding = "nearest"
    still: bool = False
    plus_zero: bool = False
    relative: bool = False
    is_float: bool = False
    unrounded: bool = False

    def __init_subclass__(cls) -> None:
        """Forget what a base states of its error where a subclass of a whole format encodes or decodes otherwise."""
        whole = any(issubclass(b, Format) and not b.__abstractmethods__ for b in cls.__bases__)
        if whole and {"encode", "decode", "number_of"} & vars(cls).keys():
            for name in {"bound", "enclose", "stuck", "cell", "keeps_zero"} - vars(cls).keys():
                setattr(cls, name, getattr(Format, name))

    @property
    def of(self) -> Literal["value", "sqrt"]:
        """The quantity that the codes count: the value, or the root of a nonnegative one."""
        return "value"

    def rounded(self, rounding: Rounding) -> Format:
        """The same format with this rounding; itself where it does not round."""
        return self

    @property
    def positive(self) -> bool:
        """True if no encoded value decodes to 0, so that it may be divided by."""
        return False

    @property
    def matrix(self) -> MatrixKind | None:
        """The matrix that the format's rows and columns belong to; None if it has none.

        A rule that has rows and columns of its own decides for both.
        """
        return None

    def of_vectors(self) -> Format:
        """Return the format that keeps the state of a tensor without rows and columns; itself where it needs none."""
        return self

    @property
    def block(self) -> int:
        """The number of neighbours that share a field; 1 where nothing is shared."""
        return max((f.per for f in self.fields().values()), default=1)

    @property
    def noise_bits(self) -> int:
        """Random bits per element that encode wants; 0 where it rounds to nearest."""
        return 0

    @property
    def signed(self) -> bool:
        """True if negative values can be held."""
        return True

    def absolute(self) -> Format:
        """The same format, not relative."""
        return self

    def counted(self, x: Num, root: Num | None) -> Num:
        """Return what of x the codes count: it, its root, or its quotient by the root of the second moment."""
        # In no assignment: a value is named by the caller's.
        if self.of == "sqrt":
            return sqrt(x / root if self.relative else x)
        return x / root if self.relative else x

    def code(self, parts: Mapping[str, Num]) -> Num:
        """The code of each element, where `parts` are an encoding: it increases with the value."""
        return parts[""]

    @property
    def bytes_per_param(self) -> float:
        return sum(f.bytes_per_param for f in self.fields().values())

    @abstractmethod
    def fields(self) -> dict[str, Field]:
        """Suffix -> Field, in storage order; what there is one of per element has the suffix ""."""

    @abstractmethod
    def encode(self, x: Num, *, noise: Noise | None = None, root: Num | None = None) -> dict[str, Num]:
        """The fields' contents for x (f32, elem).  `root` is that of the second moment which a relative format divides
        by, as it is read or before it is rounded (`encode_root`); `noise` is given iff `noise_bits` > 0."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        """x as kept: f32, elem."""

    def decode_root(self, parts: Mapping[str, Num]) -> Num:
        """The square root of a kept nonnegative value; formats of a root override it to save the root."""
        return sqrt(self.decode(parts))

    def encode_root(self, x: Num, noise: Noise | None = None) -> tuple[dict[str, Num], *tuple[Num, ...]]:
        """`encode`, and what `decode_root` makes of it; formats override it where that saves a step.

        Formats that err by a part of each root may add the root of x itself, above 0: what a state is divided by that
        the rule reads in quotients alone (verify/lint.py).
        """
        parts = self.encode(x, noise=noise)
        return parts, self.decode_root(parts)

    # -- what is known of the error; a format without `bound` is built, and said to have none

    def bound(self) -> Bound | None:
        """Return the worst error of storing a value once; None where no bound is known."""
        return None

    def enclose(self, x: Any, view: View, root: Any = None) -> Any:
        """Return the interval of decode(encode(y)) for every y in the interval x, from `bound` alone.

        root  the interval of what a relative format divides by
        """
        bound = self.bound()
        if bound is None or bound.of == "root" or bound.value == math.inf:
            return x.unknown()
        if bound.of == "value":
            return bound.around(x, bound.within(x))
        value = self.counted(x, root)
        top = self.top(value.magnitude(), view)
        error = bound.within(x) * (top.clamp(min=bound.low) * (1 + bound.excess) * (1 + dtypes.F32_UNIT))
        if self.keeps_zero():
            error = where(top == 0, 0.0, error)
        # Infinite or beyond what scales can follow: nothing is promised.
        error = where(top <= bound.high, error, math.nan)
        if bound.strict:
            error = where((view.largest(abs(value).lo, self.block) < bound.low) & (top != 0), math.nan, error)
        kept = value.widened(error)
        if self.of == "sqrt":
            kept = maximum(kept, 0.0)
            return kept * kept
        return kept if root is None else kept * root

    def top(self, magnitude: Any, view: View) -> Any:
        """Return the magnitude that decides the scale of each element."""
        return view.largest(magnitude, self.block)

    def stuck(self, decay: float) -> tuple[int, float, str]:
        """Return (how many codes, the largest value, of what) with encode(decay * decode(code)) = code, 0 aside, to
        nearest and under a scale that another element of the block holds.  0 < decay."""
        return measured.stuck(self, decay)

    def cell(self) -> float:
        """Return the widest cell of nonnegative values, relative to the value: next code / code - 1."""
        return measured.cell(self)

    def ratio(self, ratio: float) -> float:
        """Return the cell of the values of two codes that read as numbers of this ratio."""
        return float(ratio**2 - 1 if self.of == "sqrt" else ratio - 1)

    def keeps_zero(self) -> bool:
        """Return True if 0 next to other values comes back as 0."""
        return measured.keeps_zero(self)

    @property
    def exact(self) -> bool:
        """True if nothing is rounded."""
        return False

    def findings(self, nonneg: bool) -> list[FormatFinding]:
        """Return what speaks against the format whatever the state does; `nonneg`: of a state that is never negative.

        Imports no torch where the format is this package's: that takes a second of a build.
        """
        return []


def _encoding(fmt: Format, x: Value) -> tuple[ir.Node, ...]:
    """Return the operations of encoding x."""
    root, word = Value(ir.load("root", dtypes.f32, spaces.elem)), Value(ir.load("word", dtypes.i32, spaces.elem))
    noise = Noise(word, 0, fmt.noise_bits) if fmt.noise_bits else None
    parts = fmt.encode(x, noise=noise, root=root if fmt.relative else None)
    return ir.postorder([p.node for p in parts.values()])


def _rounds(nodes: Iterable[ir.Node]) -> int:
    """Return how many reductions of a block follow from one another."""
    rounds: dict[int, int] = {}
    for n in nodes:
        rounds[n.uid] = max((rounds[a.uid] for a in n.args), default=0) + (n.op in ("block_max", "block_min"))
    return max(rounds.values())


@lru_cache(maxsize=1024)
def wide_reductions(fmt: Format) -> tuple[str, ...]:
    """Return the names of reductions over more than a block that encoding needs.

    Raises E305 for one of the whole tensor, or of other values than x: kernels reduce x by rows and columns. So a state
    of either sign has no scale per row, which is a maximum of abs(x).  And for a reduction of a block that needs
    another one of it: kernels go over a block twice.
    """
    x = Value(ir.load("x", dtypes.f32, spaces.elem))
    nodes = _encoding(fmt, x)
    wide = [n for n in nodes if n.op in REDUCTIONS]
    of_others = any(n.args[0].space == spaces.elem and n.args[0] is not x.node for n in wide)
    if of_others or (wide and fmt.signed) or any(n.space == spaces.tensor for n in wide):
        what = f"{type(fmt).__name__}, whose encoder reduces the tensor, signed values or others than x,"
        want = "row_max(x), col_max(x), row_mean(x) or col_mean(x) of states that are never negative, or blocks"
        raise UserError("E305", loc=getattr(fmt, "loc", None), what=what, want=want)
    if _rounds(nodes) > 1:
        what = f"{type(fmt).__name__}, whose encoder reduces a block by what it has found of that block,"
        raise UserError("E305", loc=getattr(fmt, "loc", None), what=what, want="reductions of x or of x / root")
    return tuple(sorted({n.op for n in wide}))


class Master(ABC):
    """A way to keep a weight: the parameter itself (`""`, in the parameter's dtype) plus what else it needs.

    fp32 parameters are their own master: `param` is bf16 or f16, but for `Native`; u8 of parameters that show 8 bits.
    """

    @property
    def params(self) -> tuple[DType, ...]:
        """The dtypes of parameters that it keeps, narrower than fp32."""
        return dtypes.bf16, dtypes.f16

    @property
    def blocks(self) -> dict[int, str]:
        """The elements of a block of weights that share an entry, if any do; plans name states beside them."""
        return {f.per: "the weight" for d in self.params for f in self.fields(d).values() if f.per > 1}

    def noise_bits(self, param: DType) -> int:
        return 0

    @abstractmethod
    def fields(self, param: DType) -> dict[str, Field]:
        """Suffix -> Field; the first is "" with dtype `param`; further ones are stored as "weight_" + suffix."""

    @abstractmethod
    def encode(self, x: Num, param: DType, *, noise: Noise | None = None) -> dict[str, Num]:
        """The fields' contents for the f32 weight x."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Num], param: DType) -> Num:
        """The f32 weight."""

    def describe(self, param: DType) -> str:
        return f"{param.name} {self}"

    def bound(self, param: DType) -> Bound | None:
        """Return the worst error of keeping a weight once; None where no bound is known."""
        return None

    def enclose(self, x: Any, param: DType) -> Any:
        """Return the interval of decode(encode(y)) for every y in the interval x."""
        bound = self.bound(param)
        return x.unknown() if bound is None else bound.around(x, bound.total)

    def findings(self, param: DType) -> list[FormatFinding]:
        """Return what speaks against keeping a weight narrower than fp32 so."""
        return []
