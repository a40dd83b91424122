"""The storage format interface: what every way to keep a number between steps must say.

A format is a frozen dataclass with three methods over `optgen.lang`:

- `fields()`   what is stored: name suffix -> Field ("" is the tensor under the state's own name);
- `encode(x)`  f32 values -> what is stored;
- `decode(..)` what is stored -> f32 values.

From these alone come the bytes per parameter, every backend's kernels, the bounds, and the fuzz tests.
Called with traced values they compile; called with torch tensors of shape (..., blocks, size) they compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optgen.lang.spec import Matrix
from optgen.lang.values import Num, cast, lshr, sqrt
from optgen.ops import dtypes
from optgen.ops.dtypes import DType

Rounding = Literal["nearest", "stochastic", "auto"]


@dataclass(frozen=True)
class Field:
    """One stored tensor: `per` elements share an entry (1: shape of the parameter); `zero` decodes to 0.

    space   "elem", or for one f32 per row, column, matrix or tensor: "row", "col", "mat", "tensor"; "axis": for one per
            index of each dimension that columns are made of
    nonneg  whether its numbers are never negative, as those of scales
    least, most  between which its integers lie where they are not `zero`, read as unsigned ones; None: anywhere
    low     bit k: whether the low byte of such an integer may be k; 0: all may
    """

    dtype: DType
    per: int = 1
    zero: int | float = 0
    space: str = "elem"
    nonneg: bool = False
    least: int = 0
    most: int | None = None
    low: int = 0

    @property
    def bytes_per_param(self) -> float:
        """What an element takes; one entry of many elements is counted as nothing where it is a row's or more."""
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

    def unit(self) -> Num:
        """f32, uniform on the midpoints of 2^bits cells of (0, 1): mean exactly 1/2."""
        return (cast(self.integer(), dtypes.f32) + 0.5) * 2.0**-self.bits


class Format(ABC):
    """How the values of one state are kept between steps.

    `encode` without `noise` rounds to nearest, whatever `rounding` says.
    """

    @property
    def rounding(self) -> Rounding:
        """ "auto" is stochastic until a plan has looked at the state's recurrence (Plan.storage)."""
        return "nearest"

    def rounded(self, rounding: Rounding) -> Format:
        """The same format with this rounding; itself where it does not round."""
        return self

    @property
    def positive(self) -> bool:
        """Whether no encoded value decodes to 0, so that it may be divided by."""
        return False

    @property
    def still(self) -> bool:
        """Whether a number that is stored again and again to nearest stays, whatever its neighbours do meanwhile.

        Codes under a scale do not: one that keeps itself is read under the scale of the next step, and follows it.
        """
        return False

    @property
    def matrix(self) -> Matrix | None:
        """Which matrix the format's rows and columns are those of; None where it has none.

        A rule that has rows and columns of its own decides for both.
        """
        return None

    @property
    def as_kept(self) -> bool:
        """Whether the rule goes on with the new value as it was kept, not as it was computed."""
        return False

    def of_vectors(self) -> Format:
        """What keeps the state where a tensor has no rows and columns; itself where it needs none."""
        return self

    @property
    def block(self) -> int:
        """How many neighbours share a field; 1 where nothing is shared."""
        return max((f.per for f in self.fields().values()), default=1)

    @property
    def noise_bits(self) -> int:
        """Random bits per element that encode wants; 0 where it rounds to nearest."""
        return 0

    @property
    def signed(self) -> bool:
        """Whether negative values can be held."""
        return True

    @property
    def plus_zero(self) -> bool:
        """Whether a zero to be encoded must be +0: formats that order values by their bit patterns."""
        return False

    @property
    def relative(self) -> bool:
        """Whether values are stored relative to the root of the rule's second moment."""
        return False

    def absolute(self) -> Format:
        """The same format, not relative."""
        return self

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
        """The fields' contents for x (f32, elem).  `root` is the decoded root of the second moment that a
        relative format divides by; `noise` is given iff `noise_bits` > 0."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Num], *, root: Num | None = None) -> Num:
        """x as kept: f32, elem."""

    def decode_root(self, parts: Mapping[str, Num]) -> Num:
        """The square root of a kept nonnegative value; formats of a root override it to save the root."""
        return sqrt(self.decode(parts))

    def encode_root(self, x: Num, noise: Noise | None = None) -> tuple[dict[str, Num], Num]:
        """`encode`, and what `decode_root` makes of it; formats override it where that saves a step."""
        parts = self.encode(x, noise=noise)
        return parts, self.decode_root(parts)


class Master(ABC):
    """How a weight is kept: the parameter itself (`""`, in the parameter's dtype) plus what else it needs.

    fp32 parameters are their own master: every Master is `Native` for them.
    """

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
        return str(self)


Parts = Mapping[str, Any]
