"""The records in which a generated package describes itself to the runtime: plain data, no behaviour of their own.

A generated class lists its `Hyper`s and `Flag`s; each of its plan modules lists its `Variant`s: one kernel
each, chosen by the parameter's dtype, its size and the flags of its group.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:  # the build reads records, and importing torch takes a second
    import torch

HostFunction = Callable[..., tuple[float, ...]]

ROUNDING = 1e-12
"""The largest distance below 0 of a number that should be 0.  Schedules that multiply their way down, in fp64, miss 0
by some roundings of where they began: by 1e-20 from a rate of 3e-4, by 1e-14 after hundreds of steps from 1.  No number
that a user means is as small: a rate of that size moves no weight."""


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return True for a tensor; there is none where torch was not imported."""
    found = sys.modules.get("torch")
    return found is not None and isinstance(value, found.Tensor)


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: a number, or a tuple of numbers (`betas`), each within the range; a bool if its default is.

    rounds_of  the name of the coefficients (records/series.py) whose usual number of rounds None stands for
    whole      whether it has to be a whole number
    scheduled  whether a step takes it times lr / (the lr that its group was made with)
    lr_if      the flag of groups that take lr in its place
    """

    name: str
    default: float | tuple[float, ...]
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    rounds_of: str = ""
    whole: bool = False
    scheduled: bool = False
    lr_if: str = ""

    @property
    def range(self) -> str:
        """The range in words, "" where any number will do."""
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        found = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        return f"a whole number {found}".rstrip() if self.whole else found

    def check(
        self, value: object, owner: str, tensors: bool = False
    ) -> float | torch.Tensor | tuple[float | torch.Tensor, ...] | None:
        """Return `value` as a group keeps it: Python floats; a learning rate given as a tensor stays that tensor
        (schedulers fill it in place), and where `tensors` are kept, so does any number; None for a part of a tuple is
        its default, as torch writes what it chooses itself (Adafactor's eps).  Raises TypeError or ValueError naming
        `owner` and the range."""
        where = f"{owner}: {self.name}"
        if value is None and self.rounds_of:
            return None
        if isinstance(self.default, bool):
            return switch(value, self.name, owner)
        if not isinstance(self.default, tuple):
            number = self._number(value, where)
            return value if _is_tensor(value) and (tensors or self.name == "lr") else number
        given = zip(self._parts(value, where), self.default, strict=True)
        parts = [default if part is None else part for part, default in given]
        numbers = [self._number(part, f"{where}[{i}]") for i, part in enumerate(parts)]
        return tuple(
            part if tensors and _is_tensor(part) else number for part, number in zip(parts, numbers, strict=True)
        )

    def read(self, value: object, device: torch.device | None = None) -> Any:
        """Return the current value of the option, which schedulers may have set to anything number-like.

        Tensors on `device` are not looked at: they come as 0-dim ones, not held to the range.
        """
        if isinstance(self.default, tuple):
            return tuple(self._read(part, device) for part in self._parts(value, self.name))
        return self._read(value, device)

    def read_all(self, values: list[Any], device: torch.device | None = None) -> list[Any]:
        """Return the current values of the option in several groups, as `read` does of one; the list itself where they
        are floats."""
        columns: Iterable[Sequence[Any]] = [values]
        if isinstance(self.default, tuple):
            fit = {*map(type, values)} == {tuple} and {*map(len, values)} == {len(self.default)}
            columns = zip(*values, strict=True) if fit else [()]
        if all(map(self._are_floats, columns)):
            return values
        return [self.read(value, device) for value in values]

    def _are_floats(self, numbers: Sequence[Any]) -> bool:
        """Return True for floats within the range."""
        if {*map(type, numbers)} != {float} or any(map(math.isnan, numbers)):
            return False
        whole = not self.whole or all(map(float.is_integer, numbers))
        return whole and self.allows(min(numbers)) and self.allows(max(numbers))

    def _parts(self, value: object, where: str) -> Sequence[object]:
        """Return the numbers of a tuple, as many as there are to be."""
        assert isinstance(self.default, tuple)
        if _is_tensor(value) and value.ndim == 1:
            value = value.unbind()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(f"{where} must be {len(self.default)} numbers, got {value!r}")
        if len(value) != len(self.default):
            raise ValueError(f"{where} must be {len(self.default)} numbers, got {value!r}")
        return value

    def _read(self, value: Any, device: torch.device | None) -> Any:
        there = device is not None and _is_tensor(value) and value.device == device
        if there and value.numel() == 1 and not value.is_complex():
            return value.detach().reshape(())
        return self._number(value, self.name)

    def _number(self, value: object, where: str) -> float:
        """Return one number, if it is in the range."""
        number = value if type(value) is float else as_float(value)
        if number is None:
            raise TypeError(f"{where} must be a number, got {value!r}")
        if self.allows(number):
            return number
        if self.ge == 0.0 and -ROUNDING <= number < 0.0 and self.allows(0.0):  # LinearLR(end_factor=0) gives such
            return 0.0
        got = repr(number).removesuffix(".0") if self.whole else repr(number)
        raise ValueError(f"{where} must be {self.range or 'a number'}, got {got}")

    def allows(self, number: float) -> bool:
        """Return True if one number is in the range; NaN never is."""
        return (
            not math.isnan(number)
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
            and (not self.whole or number == number // 1)
        )


def as_float(value: object) -> float | None:
    """`value` as a Python float: real numbers of any kind and one-element tensors; None for all else, and for integers
    beyond the range of a float."""
    if _is_tensor(value):
        return float(value.item()) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (str, bytes, complex)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def switch(value: object, name: str, owner: str) -> bool:
    """Return a bool as it is; TypeError for anything else."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")


def as_int(value: object) -> int | None:
    """`value` as a Python int where it is one (NumPy's too), else None."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def fed_name(name: str) -> str:
    """Return the host state that says if an input is fed: 1 for the next step, 2 for all further ones, else 0."""
    return f"{name}_fed"


@dataclass(frozen=True)
class Flag:
    """A switch: a constructor argument; or (`nonzero` given) true iff that hyper-parameter is not 0; or (`shape` given)
    what the function says of a parameter's shape; or (`every` given) true at the multiples of that hyper-parameter; or
    (`first`) true at the first step, and with `every` at each such number of steps after it; or (`fed`) true at the
    steps for which that input, or each of "one and other", was fed.

    needs, excludes  hyper-parameters that must not be 0, or must be 0, where the flag is on
    """

    name: str
    default: bool = False
    nonzero: str | None = None
    needs: str | None = None
    excludes: str | None = None
    shape: Callable[..., bool] | None = None
    every: str | None = None
    first: bool = False
    fed: str | None = None

    @property
    def derived(self) -> bool:
        """True if no constructor argument sets it."""
        return self.nonzero is not None or self.shape is not None or self.clock is not None

    @cached_property
    def clock(self) -> str | None:
        """The hyper-parameter that turns it on and off from step to step, or its own name; None if nothing does."""
        return self.name if self.first else fed_name(self.fed) if self.fed else self.every

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that it follows."""
        return tuple(self.fed.split(" and ")) if self.fed else ()

    def all_fed(self, host: Mapping[str, Any]) -> bool:
        """Return True if each of its inputs is fed, as the host states of a parameter say."""
        return all(host.get(fed_name(name), 0.0) > 0 for name in self.inputs)

    @property
    def limits(self) -> tuple[str, ...]:
        """The hyper-parameters that its function of the shape takes."""
        code = getattr(self.shape, "__code__", None)
        return code.co_varnames[1 : code.co_argcount] if code else ()

    def holds(self, shape: tuple[int, ...], values: Mapping[str, Any]) -> bool:
        """Return what its function says of a shape, with these hyper-parameters."""
        assert self.shape is not None
        return bool(self.shape(shape, *(values[name] for name in self.limits)))

    def check(self, group: Mapping[str, Any], owner: str) -> None:
        """ValueError where the flag is on without a hyper-parameter that it needs, or with one that it excludes."""
        if self.derived or not group.get(self.name):
            return
        if self.needs is not None and self.needs in group and group[self.needs] == 0:
            raise ValueError(f"{owner}: {self.name}=True needs {self.needs}, which is 0")
        if self.excludes is not None and self.excludes in group and group[self.excludes] != 0:
            raise ValueError(f"{owner}: {self.name}=True needs {self.excludes}=0, got {group[self.excludes]!r}")


class Heads(NamedTuple):
    """Blocks of so many consecutive rows, each of which is a matrix; `stacked`: rows of the last two dimensions."""

    rows: int
    stacked: bool = False


Matrix = str | int | Heads
"""Whose rows and columns a rule reduces: "last", those of the last two dimensions; "first", of dimension 0 against the
rest; a number, likewise, where so many consecutive rows are one row; Heads, likewise, of each block of rows.  "heads"
is the matrix of a rule that leaves it to the parameter (`by_shape`, options/blocks.py) which of these it has."""


def by_shape(shape: Sequence[int]) -> str:
    """Return the matrix of a parameter under a rule of matrix="heads", if its user says nothing.

    Three dimensions of which the last two have at least 8 indices are a stack of matrices.  Anything else, such as the
    weight of a convolution with a short kernel, is one matrix of dimension 0 against the rest.
    """
    return "last" if len(shape) == 2 or (len(shape) == 3 and min(shape[1:]) >= 8) else "first"


def seen(shape: Sequence[int]) -> tuple[int, ...]:
    """Return (..., rows, columns) of a parameter under a rule of matrix="heads", if its user says nothing."""
    flat = len(shape) > 2 and by_shape(shape) == "first"
    return (shape[0], math.prod(shape[1:])) if flat else tuple(shape)


MATRICES = frozenset(a + b for a in "mnslr" for b in "mnslr") - {"mn"}
"""Spaces of whole matrices beside those of elements, by their two dimensions: m rows, n columns, the shorter of these
s, the longer l, a low rank r."""

MATRIX_BLOCK = 64
"""Entries of a matrix state that share a scale where it is kept in 8 bits."""

PACK = 64
"""Columns that packed codes are read in where nothing else is in blocks."""

EIGHT = 8
"""Elements whose packed codes fill whole bytes; blocks are wider."""


@dataclass(frozen=True)
class Field:
    """One stored tensor of a parameter's state.  Example: the scales of AdamW's first moment in 8 bits,
    `Field("exp_avg_scale", "int16", per=64, state="exp_avg")`.

    per     1: the shape of the parameter; B: one entry for each block of B columns, shape (rows, ceil(columns / B));
            EIGHT: packed codes of `width` bits, shape (rows, ceil(columns / 8) * width)
    zero    the entry that decodes to 0 (128)
    state   the owner, of which it stores a part: a state, or "p" for the weight
    width   bits of a packed code, which are the bytes of eight: byte j holds those of neighbours, the first in its
            lowest bits; 1 of all else
    space   "elem", or where there are few values: "row" (..., rows, 1), "col" (..., 1, columns), "mat" (..., 1, 1) of
            the last two dimensions, "tensor" (); "transposed" of a view: as "elem" of the transposed parameter
    matrix  the two dimensions that these are (layout.matrix_shape)
    shared  True for a part of a state with a value for each element that has fewer entries
    nonneg  True if none of its floats is negative; of a state's first field: if no value of the state is
    rank    of matrices of low rank: the hyper-parameter that is the rank, or the number for one group (`in_blocks`); a
            matrix of fewer rows or columns has as many
    part    of a matrix state: "" for all of it, "lower" half of its entries, "diagonal" these alone, "scale" one entry
            for each block of codes, "ends" two, "lower scale" one for each block of half of them
    """

    name: str
    dtype: str
    per: int = 1
    zero: int | float = 0
    state: str = ""
    width: int = 1
    space: str = "elem"
    matrix: Matrix = "last"
    shared: bool = False
    nonneg: bool = False
    rank: str | int = 0
    part: str = ""

    @property
    def wide(self) -> bool:
        """True if the state that it belongs to has a value for each element."""
        return self.space == "elem" or self.shared

    @property
    def of_values(self) -> Field:
        """A field of the shape of the state's values, where it is a part of a matrix state."""
        return replace(self, part="") if self.part else self

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @cached_property
    def owner(self) -> str:
        return self.state or self.name


@dataclass(frozen=True)
class Temp:
    """An fp32 value that one stage of a step leaves for later ones, shaped as a field of its space.  Example: the sums
    of rows that CAME's first sweep leaves, `Temp("row_sum_for_exp_avg_sq_row", "row", "row_sum", "elem")`.

    reduction  how sums over a space become it ("row_sum", "tensor_max"); "" where a stage stores it as it is
    source     the space that is summed over ("elem")
    wide       True for fp32 values of elements; others are kept in bf16
    """

    name: str
    space: str
    reduction: str = ""
    source: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Stage:
    """One kernel of a step.  Example: the sweep of AdamW, `Stage("adamw", "elem", reads=("p", "g", "exp_avg",
    "exp_avg_sq"), stores=("p", "exp_avg", "exp_avg_sq"), needs=("g", "exp_avg_sq"))`.

    kernel    the kernel's name ("came_2"), or that of the function it calls ("newton_schulz")
    space     the space over whose entries it runs: "elem" for a sweep, a small space such as "row"; "call" for a
              function of optgen.runtime.reference.matrices, which changes its temp in place; "whole" for a function of
              whole matrices in the rule's module, from `reads`, scalars and `extents` to `stores`
    scalars   positions of its scalars among those of the step ((2, 3)); the only stage of a step may leave it out
    given     further arguments of a "call": numbers, and None for the next of its scalars ((None, 1.0, None))
    reads     names of the values it reads: "p", "g", states and temps
    stores    names of the values it stores, in the order in which its function returns them
    sums      (kind, names of temps) of each term that it reduces ((("square", ("row_sum_of_g",)),)); kinds as in
              optgen.runtime.gpu.walk
    extents   sizes of the logical tensor that it computes with ("rows")
    zeros     nonnegative states that it may store as -0
    picked    states that it stores as they were read somewhere, so that their NaN may be any
    needs     the values of `reads` that new values of nonnegative states are made of
    linear    of a sweep that stores a * g or a * (b * x + p), x a temp, and nothing else: positions of a, or of a and b

    What follows from these (`join.completed`) and from the plan:

    level     the number of the stretch that it belongs to; what is of one level waits for all of the level before (0)
    temps     names of the temps that it stores or reduces to
    matrices  True if it reads or reduces values of rows, columns or matrices
    block     elements of a storage block that it touches (64); 1 if it touches none
    state     of small work for a state that is kept as a whole: its name; the kernel is a function of its codec
    reduces   of a first walk, which stores nothing: names among `stores` that are reduced, one for each of `sums`
    absent    of a first walk: names in `reads` that nothing depends on
    """

    kernel: str
    space: str
    scalars: tuple[int, ...] = ()
    given: tuple[float | None, ...] = ()
    reads: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    sums: tuple[tuple[str, tuple[str, ...]], ...] = ()
    extents: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    picked: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    linear: tuple[int, ...] = ()
    level: int = 0
    temps: tuple[str, ...] = ()
    matrices: bool = False
    block: int = 1
    state: str = ""
    reduces: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def on_host(self) -> bool:
        """True for functions of whole matrices, which torch computes."""
        return self.space in ("call", "whole")

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of the temps that it reduces to."""
        return tuple(name for _, names in self.sums for name in names)

    def renamed(self, name: Callable[[str], str], state: str = "") -> Stage:
        """Return the small work of a format with other names of values, and of the state that it is for."""

        def of(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(map(name, names))

        sums = tuple((kind, of(names)) for kind, names in self.sums)
        named: dict[str, Any] = {key: of(getattr(self, key)) for key in ("temps", "reads", "stores")}
        return replace(self, **named, sums=sums, state=state)


@dataclass(frozen=True)
class View:
    """A further encoding of the new weight, made when it is stored, and that no step reads.

    name    also that of its codec in the plan's module ("mxfp8_rows")
    size    elements of a row that share a scale (32)
    fields  its tensors: codes of elements, words of bytes of blocks, one for each storage block, and the tensor's scale
            where there is one, which the step reads
    """

    name: str
    size: int
    fields: tuple[Field, ...]

    @property
    def scaled(self) -> bool:
        """True if the tensor has a scale."""
        return self.fields[-1].space == "tensor"

    @property
    def transposed(self) -> bool:
        """True if it encodes the transposed weight, after the sweep that stores this; else that sweep makes it."""
        return self.fields[0].space == "transposed"

    def in_blocks(self, block: int) -> View:
        """Return the view beside values in storage blocks of so many elements, each of which holds some of its own."""
        word = {1: "uint8", 2: "int16", 4: "int32"}[block // self.size]
        fields = (replace(f, dtype=word, per=block) if f.per == self.size else f for f in self.fields)
        return replace(self, fields=tuple(fields))


COPY = "copy"
"""The kernel of small work that stores, or reduces, the one value that it reads as it is."""


@dataclass(frozen=True)
class Whole:
    """The work for a state that is kept as a whole, in one format; names are suffixes of the state's.

    decode   fields and temps that the codec's `decode` and `root` take, in order
    encode   temps that its `encode` and `nearest` take behind the value
    sums     (kind, temps) of each term that the new value is reduced to
    before   small work that reading needs; kernels "small_1", "small_2" ... are functions of the codec
    between  small work that makes the new vectors
    temps    what these leave
    kept     (field, temp, space) of each vector that is read until the new value is stored
    """

    decode: tuple[str, ...]
    encode: tuple[str, ...] = ()
    sums: tuple[tuple[str, tuple[str, ...]], ...] = ()
    before: tuple[Stage, ...] = ()
    between: tuple[Stage, ...] = ()
    temps: tuple[Temp, ...] = ()
    kept: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Rule:
    """The step of a rule under some settings of its flags, in the maths of its kernels, before it meets a plan.

    settings  settings of flags that it is for (({"amsgrad": False},)); a flag that is not in one may be either
    scalars   the number of its scalars (7)
    host      (step, grad_scale, **hypers, **host_states) -> scalars, then new host states; fp64
    temps     space -> names of values that stages leave for one another, where another space does not follow: that of
              the stage that stores one, or the first word of what is summed ("row_sum_of_g"); `WIDE` is a space, too
    stages    its kernels, in order
    early     states that later sweeps of the step read as they are stored
    strict    True if sums are taken in the order that every backend has
    """

    settings: tuple[Mapping[str, bool], ...]
    scalars: int
    host: HostFunction
    temps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    early: tuple[str, ...] = ()
    strict: bool = False


WIDE = "wide"
"""The space in `Rule.temps` of values of elements in fp32."""


@dataclass(frozen=True)
class Eager:
    """The storage of a rule's values under a plan.

    codecs    owner ("p" or a state) -> name of its codec in the plan's module ({"exp_avg": "signed"}); others are fp32
    relative  state -> the state whose root it is divided by ({"exp_avg": "exp_avg_sq"})
    unrounded  states that others are divided by with the root before it is rounded
    noise     owner -> (word, shift) of its random bits ({"p": (1, 24)}); others round to nearest
    words     recipes of the words of random bits (`keys.Word`)
    early     states that later sweeps of the step read as they are stored
    still     states that the step leaves as they are stored
    whole     state that is kept as a whole -> the work for it
    matrices  matrix state -> the codec of reference/matrix_codecs.py that keeps it ({"left": "symmetric"})
    over      matrix state -> the matrix state by whose root, as it reads, it is divided
    random    matrix states that are rounded stochastically
    """

    codecs: Mapping[str, str] = field(default_factory=dict)
    relative: Mapping[str, str] = field(default_factory=dict)
    unrounded: frozenset[str] = frozenset()
    noise: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    words: tuple[tuple[int, tuple[tuple[int, int], ...], bool], ...] = ()
    early: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    whole: Mapping[str, Whole] = field(default_factory=dict)
    matrices: Mapping[str, str] = field(default_factory=dict)
    over: Mapping[str, str] = field(default_factory=dict)
    random: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Variant:
    """A rule under a plan, for parameters of one dtype and size class, and one setting of the flags.

    function     its name ("adamw_bfloat16_small")
    param        dtype of the parameter ("bfloat16")
    fields       the tensors that are stored, in order
    small        True for tensors too small to be worth quantizing
    vector       True for tensors of fewer than two dimensions, where the plan keeps these in another way
    flags        the setting of the flags ({"amsgrad": False})
    host_states  (name, first value) of each number of a parameter that stays on the host (("peak_lr", 0.0))
    init         state -> its first value where that is not 0: a number, or "param" for the weight
    temps        the values that stages leave for one another
    stages       the kernels of a step that takes more than one, in order; () where the step is one sweep
    rows         True if other steps of the same parameter, with other flags, work on rows and columns
    matrix       the matrix whose shape kernels see in the place of the parameter's (layout.matrix_shape)
    eager        how each value is stored
    rule         the step: in the maths of its kernels, or in strict maths for the eager reference
    rank         rank of its matrices of low rank in one group (`in_blocks`); 0 if there are none
    views        further encodings of the weight
    """

    function: str
    param: str
    fields: tuple[Field, ...]
    small: bool = False
    vector: bool = False
    flags: Mapping[str, bool] = field(default_factory=dict)
    host_states: tuple[tuple[str, float], ...] = ()
    init: Mapping[str, float | str] = field(default_factory=dict)
    temps: tuple[Temp, ...] = ()
    stages: tuple[Stage, ...] = ()
    rows: bool = False
    matrix: Matrix = "last"
    eager: Eager = field(default_factory=Eager)
    rule: Rule | None = None
    rank: int = 0
    views: tuple[View, ...] = ()

    @cached_property
    def block(self) -> int:
        """The elements of a storage block of the fields that are in blocks; 1: none is."""
        return self.block_of(("p", *self._owned), True)

    @cached_property
    def stochastic(self) -> bool:
        """True if it draws random bits to round by."""
        return bool(self.eager.words or self.eager.random)

    def owned(self, owner: str) -> tuple[str, ...]:
        """Names of the fields that store part of a state, or of "p"."""
        return self._owned.get(owner, ())

    def read_from(self, owner: str) -> tuple[str, ...]:
        """Names of what a value is read from, in the order in which its codec takes them."""
        if owner in self.eager.whole:
            return tuple(f"{owner}_{x}" for x in self.eager.whole[owner].decode)
        return ("p", *self.owned("p")) if owner == "p" else self.owned(owner) or (owner,)

    def stored_by(self, stage: Stage) -> list[str]:
        """Names of the values that a stage stores under the plan."""
        return [] if stage.reduces else [x for x in stage.stores if x not in self.eager.still]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the tensors whose addresses a row of the table of its kernels begins with."""
        return ("p", "g", *self.names, *(f.name for f in self.shown), *(t.name for t in self.temps))

    @cached_property
    def swept(self) -> tuple[View, ...]:
        """The views that the sweep makes which stores the weight."""
        return tuple(view for view in self.views if not view.transposed)

    @cached_property
    def shown(self) -> tuple[Field, ...]:
        """The tensors of its views, in order."""
        return tuple(f for view in self.views for f in view.fields)

    @cached_property
    def stored(self) -> Mapping[str, Field]:
        """All that is stored beside the weight and in views, by name."""
        return {f.name: f for f in (*self.fields, *self.shown)}

    @cached_property
    def reduced(self) -> tuple[Temp, ...]:
        """The temps that sweeps reduce from elements, and that have partial results."""
        return tuple(t for t in self.temps if t.source == "elem")

    @cached_property
    def spaces(self) -> Mapping[str, str]:
        """Field or temp -> its space."""
        return {x.name: x.space for xs in (self.fields, self.temps) for x in xs}

    def coded(self, state: str) -> tuple[str, ...]:
        """Names of the fields that a matrix state is read from: its own, then those of the one that it is over."""
        return self.owned(state) + self.owned(self.eager.over.get(state, ""))

    @cached_property
    def _owned(self) -> Mapping[str, tuple[str, ...]]:
        owners = dict.fromkeys(f.owner for f in self.fields)
        return {o: tuple(f.name for f in self.fields if f.owner == o) for o in owners}

    @cached_property
    def needs_matrix(self) -> bool:
        """True if it keeps or computes anything per row, column or matrix, at this or another step."""
        return self.sums_by_matrix or any(s.on_host for s in self.stages)

    @cached_property
    def sums_by_matrix(self) -> bool:
        """True if it keeps or computes values of rows, columns or matrices, at this or another step."""
        spaces = {x.space for xs in (self.fields, self.temps, self.stages) for x in xs}
        return self.rows or not spaces.isdisjoint({"row", "col", "mat"})

    @cached_property
    def left_per_element(self) -> int:
        """The bytes that the stages of a step leave for one another of each element."""
        return sum(4 if t.wide else 2 for t in self.temps if t.space == "elem")

    @cached_property
    def of_whole(self) -> bool:
        """True if its states can be read and written only for the whole tensor at once."""
        return any(f.shared for f in self.fields)

    @cached_property
    def single(self) -> Rule | None:
        """The rule of a step that is one sweep and knows elements and blocks only."""
        if self.rule is None or len(self.rule.stages) > 1:
            return None
        (stage,) = self.rule.stages
        few = stage.matrices or bool(stage.extents) or any(f.space != "elem" for f in self.fields)
        return None if few or stage.space != "elem" else self.rule

    def in_stages(self) -> Variant:
        """Return the variant with its rule's scalars, and the stages if it takes several, in the blocks of its plan."""
        rule = self.rule
        if rule is None or self.single is not None:
            return self
        stages = []
        for k, stage in enumerate(rule.stages):
            own = replace(stage, kernel=f"{self.function}_{k + 1}", block=self.block_in(stage))
            stages.append(stage if stage.on_host else own)
        return replace(self, stages=tuple(stages))

    def owners_in(self, stage: Stage) -> list[str]:
        """Return the values that a stage of the rule touches: those read, those stored, those whose roots are read."""
        stores = [] if stage.reduces else [x for x in stage.stores if x not in self.eager.still]
        owners = dict.fromkeys([*[x for x in stage.reads if x not in stage.absent], *stores])
        return list(owners | {x: None for name, x in self.eager.relative.items() if name in owners})

    def block_in(self, stage: Stage) -> int:
        """Return the elements of a storage block of what a stage of the rule touches; 1: nothing is in blocks."""
        return self.block_of(self.owners_in(stage), "p" in self.stored_by(stage))

    def block_of(self, owners: Collection[str], shown: bool) -> int:
        """Return the elements of a storage block of these values, and of views if they are `shown`."""
        fields = [f for f in self.fields if f.owner in owners] + [f for v in self.swept for f in v.fields] * shown
        block = max((f.per for f in fields if f.per != EIGHT), default=1)
        return block if block > 1 or all(f.per != EIGHT for f in fields) else PACK

    @property
    def host(self) -> tuple[HostFunction, int]:
        """(host function, number of scalars that it returns before the host states)."""
        assert self.rule is not None
        return self.rule.host, self.rule.scalars

    @cached_property
    def model_temps(self) -> tuple[str, ...]:
        """Sums over the model that the step needs, in the order in which they are taken."""
        summed = {t.name for t in self.temps if t.space == "model" and t.reduction}
        return tuple(name for stage in self.stages for name in stage.temps if name in summed)

    @cached_property
    def of_model(self) -> tuple[str, ...]:
        """Names of the fields that the whole model has one value of."""
        return tuple(f.name for f in self.fields if f.space == "model")

    @cached_property
    def in_parts(self) -> bool:
        """True if the host has something to do between the kernels of a step."""
        return bool(self.model_temps) or any(s.on_host for s in self.stages)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the tensor states, in order."""
        return tuple(dict.fromkeys(f.owner for f in self.fields if f.owner != "p"))

    @cached_property
    def nonneg(self) -> frozenset[str]:
        """The states of which no value is negative."""
        return frozenset(name for name in self.states if next(f for f in self.fields if f.owner == name).nonneg)

    def is_plain(self, state: str) -> bool:
        """Return True if a state is kept as one tensor of floats: its own values, as they are."""
        return all(f.name == state and f.torch_dtype.is_floating_point for f in self.fields if f.owner == state)

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every key of a parameter's state."""
        return frozenset({"step", *(f.name for f in self.fields), *(name for name, _ in self.host_states)})

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.fields)

    @cached_property
    def host_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.host_states)


@lru_cache(maxsize=4096)
def in_blocks(variant: Variant, matrix: Matrix, rank: int = 0) -> Variant:
    """The variant for parameters that have this matrix, and states of this rank.

    The kernels are the same: they are told other sizes.  If rows are put into blocks, all that is stored lies along
    these longer rows.
    """
    fields = (f if isinstance(matrix, str) and f.space == "elem" else replace(f, matrix=matrix) for f in variant.fields)
    fields = (replace(f, rank=rank) if isinstance(f.rank, str) else f for f in fields)
    views = (replace(v, fields=tuple(replace(f, matrix=matrix) for f in v.fields)) for v in variant.views)
    return replace(variant, fields=tuple(fields), matrix=matrix, rank=rank, views=tuple(views))


def beside(variant: Variant, other: Variant) -> Variant:
    """Return a variant with the matrix and the rank of another one, which is for the same parameter at other steps."""
    own = isinstance(other.matrix, str) and variant.matrix != "heads" and not other.rank
    return variant if own else in_blocks(variant, other.matrix, other.rank)


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name ("bfloat16", "uint8")."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
