"""The declarations that a spec's signature is made of: the defaults of its parameters.

exp_avg_sq=state(nonneg)                 one value per element, never negative
row_avg=row(nonneg, when="factored")     one value per row of the last two dimensions
mu_product=scalar(1.0)                   one number per parameter, kept on the host in fp64
betas=hyper((0.9, 0.999), ge=0, lt=1)    a constructor argument with its range
amsgrad=flag(False)                      a constructor argument that picks the code at build time
has_momentum=flag(nonzero="momentum")    such a switch, set by a hyper-parameter being nonzero
factored=shape_flag(lambda shape: ...)   such a switch, set by the parameter's shape
sync=flag(every="k")                     such a switch, on at steps k, 2 k, 3 k ...
distance=model_state()                   one number for all parameters, on the device
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.base.names import is_text
from optgen.lang.values import author_loc
from optgen.ops import spaces
from optgen.ops.spaces import Space
from optgen.runtime.records import Flag, Hyper, fed_name
from optgen.runtime.records.series import number, plain

Shape = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Trait:
    """A fact about a state that its storage may rely on."""

    name: str

    def __repr__(self) -> str:
        return self.name


nonneg = Trait("nonneg")
symmetric, orthogonal, triangular = Trait("symmetric"), Trait("orthogonal"), Trait("triangular")


USUAL = {
    "lr": "the learning rate",
    "momentum": "the decay of the momentum",
    "betas": "the decays of the averages of the gradient and of its square",
    "beta1": "the decay of the average of the gradient",
    "eps": "added to the denominator, so that it is not 0",
    "weight_decay": "the weight decay",
    "amsgrad": "divide by the largest second moment so far",
    "nesterov": "Nesterov's momentum",
    "dampening": "the share of the gradient that does not enter the momentum",
    "decoupled_weight_decay": "shrink the weight by lr * weight_decay, instead of adding the decay to the gradient",
    "adamw": "True for a group that AdamW steps",
    "adamw_lr": "the learning rate of parameters that AdamW steps",
    "adamw_betas": "the betas of parameters that AdamW steps",
    "adamw_eps": "the eps of parameters that AdamW steps",
    "ns_steps": "the rounds of Newton-Schulz",
    "ns_coefficients": "the coefficients of Newton-Schulz",
}
"""The meaning of an argument of this name where its author gives no doc=."""


@dataclass(frozen=True)
class HyperDecl(Hyper):
    """A hyper-parameter as its author declares it, with the names of its scalars.

    `parts` is ("lr",) for a number and the author's names for a tuple: ("beta1", "beta2") for betas.
    `series`: the value is coefficients of newton_schulz, which kernels take as one number.
    """

    parts: tuple[str, ...] = ()
    loc: Loc | None = None
    series: bool = False
    doc: str = field(default="", compare=False)

    @property
    def meaning(self) -> str:
        """The author's words on it, or the usual ones of its name; "" if there are none."""
        return self.doc or USUAL.get(self.name, "")

    @property
    def divided(self) -> bool:
        """True if each of several numbers is a scalar of its own."""
        return isinstance(self.default, tuple) and not self.series

    @property
    def values(self) -> tuple[float, ...]:
        """The default, one number per part."""
        return self.numbers(self.default)

    def numbers(self, value: Any) -> tuple[float, ...]:
        """Return a value as one number per part."""
        if self.series:
            return (number(value),)
        return tuple(value) if isinstance(value, (tuple, list)) else (float(value),)

    @property
    def interval(self) -> tuple[float, float]:
        """The range as the closed interval of the fp64 numbers in it."""
        low = -math.inf if self.gt is None else math.nextafter(self.gt, math.inf)
        high = math.inf if self.lt is None else math.nextafter(self.lt, -math.inf)
        return low if self.ge is None else float(self.ge), high if self.le is None else float(self.le)


INPUT = "input"
"""The trait of a state that the user feeds."""


@dataclass(frozen=True)
class FlagDecl(Flag):
    """A static switch as its author declares it.

    text  the lambda of a wrapper's shape flag; a rule's own is in the rule's source
    """

    loc: Loc | None = None
    text: str = ""
    doc: str = field(default="", compare=False)

    @property
    def meaning(self) -> str:
        """The author's words on it, or the usual ones of its name; "" if there are none."""
        return self.doc or USUAL.get(self.name, "")


@dataclass(frozen=True)
class StateDecl:
    """A tensor kept between steps."""

    name: str
    space: Space
    nonneg: bool = False
    when: str | None = None
    init: float | str = 0.0
    normalized_by: str | None = None
    loc: Loc | None = None
    trait: str = ""
    rank: str | int = ""


@dataclass(frozen=True)
class HostStateDecl:
    """A number per parameter kept between steps: fp64, on the host."""

    name: str
    init: float
    when: str | None = None
    loc: Loc | None = None


Declaration = HyperDecl | FlagDecl | StateDecl | HostStateDecl
Kind = TypeVar("Kind", HyperDecl, FlagDecl, StateDecl, HostStateDecl)


class Schema(NamedTuple):
    """The declarations of a signature by kind.

    host_states  also one for each input, which says if it was fed
    order        states and host states as they stand in the signature, which is how a rule returns them
    """

    hypers: tuple[HyperDecl, ...]
    flags: tuple[FlagDecl, ...]
    states: tuple[StateDecl, ...]
    host_states: tuple[HostStateDecl, ...]
    order: tuple[str, ...]


def schema(declared: Sequence[Declaration]) -> Schema:
    def of(kind: type[Kind]) -> tuple[Kind, ...]:
        return tuple(d for d in declared if isinstance(d, kind))

    fed = [s for s in of(StateDecl) if s.trait == INPUT]
    counts = [HostStateDecl(fed_name(s.name), 0.0, loc=s.loc) for s in fed]
    order = [d.name for d in declared if isinstance(d, (StateDecl, HostStateDecl)) and d not in fed]
    return Schema(of(HyperDecl), of(FlagDecl), of(StateDecl), (*of(HostStateDecl), *counts), tuple(order))


def _refuse(what: str, hint: str) -> UserError:
    return UserError("E113", loc=author_loc(), what=what, hint=hint)


def _number(what: str, x: object, hint: str = "") -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise _refuse(f"{what} is a number, got {x!r}", hint)
    return float(x)


def _finite(what: str, x: object, hint: str = "") -> float:
    value = _number(what, x, hint)
    if not math.isfinite(value):
        raise _refuse(f"{what} is a finite number, got {value:g}", hint)
    return value


def _line(doc: object) -> None:
    if not is_text(doc) or len(str(doc).splitlines()) > 1:
        raise _refuse(f"doc= is one line of text, got {doc!r}", 'doc="the decay of the average"')


def _state(
    space: Space, traits: tuple[object, ...], when: object, init: object, normalized_by: str | None = None,
    forms: tuple[Trait, ...] = (),
) -> StateDecl:  # fmt: skip
    known = (nonneg, *forms)
    if len(traits) > 1 or any(t not in known for t in traits):  # a list has no hash
        wanted, got = " or ".join(f"`{x.name}`" for x in known), ", ".join(map(repr, traits))
        hint = "declare one of them, or none" if forms else "state(nonneg, when=..., init=...)"
        raise _refuse(f"a state's only trait is {wanted}, got {got}", hint)
    if when is not None and not isinstance(when, str):
        raise _refuse(f"when= is the name of a flag in quotes, got {when!r}", 'for instance when="amsgrad"')
    form = "".join(t.name for t in forms if t in traits)
    start = _start(space, nonneg in traits, init)
    return StateDecl("", space, nonneg in traits, when, start, normalized_by, trait=form)


def _start(space: Space, positive: bool, init: object) -> float | str:
    """Return the checked value of init=."""
    if isinstance(init, str):
        if init == "param" and (space is not spaces.elem or positive):
            raise _refuse('init="param" is for signed element-wise states', "")
        return init
    start = _finite("init=", init)
    if positive and start < 0:
        raise _refuse(f"a state declared nonneg cannot start at {start:g}", "")
    return start


def state(*traits: Trait, when: str | None = None, init: Any = 0.0, normalized_by: str | None = None) -> Any:
    """One value per element, shape of the parameter.

    when           the flags under which it exists: "amsgrad", "not factored", "a and b"
    init           its value before the first step: a number, or "param" for a copy of the weight
    normalized_by  the nonneg state whose root the rule divides this one by (where it is present): a bounded quotient
    """
    return _state(spaces.elem, traits, when, init, normalized_by)


def input(*traits: Trait) -> Any:
    """A further value per element that the user feeds: `opt.feed(name=tensors)`; fp32 under every plan.

    The rule does not return it.  flag(fed="name") holds at the steps for which it was fed; a rule without such a flag
    makes no other step.
    """
    return replace(_state(spaces.elem, traits, None, 0.0), trait=INPUT)


def _declaration(name: str, space: Space, doc: str) -> Callable[..., Any]:
    """Return the function that declares a state with one value for each of a space."""

    def declare(*traits: Trait, when: str | None = None, init: float | str = 0.0) -> Any:
        return _state(space, traits, when, init)

    declare.__name__ = declare.__qualname__ = name
    declare.__doc__ = doc
    return declare


row = _declaration("row", spaces.row, "One value per row: the parameter's shape without its last dimension.")
col = _declaration("col", spaces.col, "One value per column: the parameter's shape without its last but one dimension.")
mat = _declaration("mat", spaces.mat, "One value per matrix: the parameter's shape without its last two dimensions.")
tensor_state = _declaration("tensor_state", spaces.tensor, "One value per parameter tensor, on its device.")
model_state = _declaration(
    "model_state", spaces.model, "One value for all parameters of the optimizer, on their device.\n\n"
    "init  its value before the first step: a number, or the name of a hyper-parameter",
)  # fmt: skip


def matrix_state(side: str, *traits: Trait, when: str | None = None, init: Any = 0.0) -> Any:
    """A matrix for each matrix of the parameter: (rows, rows) for side="rows", (columns, columns) for "columns", and of
    the shorter of the two for "short".

    traits  one of symmetric, orthogonal, triangular (nonzero on and above the diagonal) and nonneg: what formats may
            rely on
    init    before the first step: "identity", or the number in every place
    """
    dims = {"rows": "mm", "columns": "nn", "short": "ss"}.get(side)
    if dims is None:
        what = f'a matrix state is one of "rows", of "columns" or of the "short" side, got {side!r}'
        raise _refuse(what, 'matrix_state("rows")')
    start = init if init == "identity" else _finite("init=", init, 'a number, or "identity"')
    first = start if start != "identity" else 0.0
    declared = _state(Space(dims), traits, when, first, None, (symmetric, orthogonal, triangular))
    return replace(declared, init=start)


def low_rank_state(
    side: str, *traits: Trait, rank: str | int, when: str | None = None, init: float = 0.0,
    normalized_by: str | None = None,
) -> Any:  # fmt: skip
    """A matrix of low rank r for each matrix of the parameter: (rows, r) for side="rows", (r, columns) for "columns",
    and of its shorter and its longer side (shorter, r) for "short", (r, longer) for "long".

    traits  orthogonal (columns, or rows, that are or nearly) or nonneg
    rank    r: a number, or the hyper-parameter that it is, hyper(..., ge=1, whole=True); a matrix of fewer rows or
            columns has as many
    init    the number in every place before the first step
    normalized_by  as in `state`, one of the same side
    """
    sides = {"rows": "mr", "columns": "rn", "short": "sr", "long": "rl"}
    if side not in sides:
        raise _refuse(f"a state of low rank is one of {', '.join(sides)}, got {side!r}", 'low_rank_state("rows", ...)')
    if not (isinstance(rank, str) or (type(rank) is int and rank >= 1)):
        what = f"rank= is a whole number from 1 on, or the name of a hyper-parameter in quotes, got {rank!r}"
        raise _refuse(what, 'for instance rank="rank"')
    start = _finite("init=", init, "a number")
    return replace(_state(Space(sides[side]), traits, when, start, normalized_by, (orthogonal,)), rank=rank)


def scalar(init: float = 0.0, *, when: str | None = None) -> Any:
    """One number per parameter, kept on the host in fp64; it may depend on hyper-parameters and t only."""
    return HostStateDecl("", _number("scalar(...)", init), when)


def hyper(
    default: float | tuple[float, ...] | str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    series: bool = False,
    rounds_of: str = "",
    whole: bool = False,
    scheduled: bool = False,
    lr_if: str = "",
    doc: str = "",
) -> Any:
    """A constructor argument: a number, or a tuple of numbers that all obey the range; hyper(False) takes True and
    False, which are 1 and 0.

    series     it takes whatever newton_schulz takes as coefficients
    rounds_of  None, which the constructor takes by default, is the usual number of rounds of those coefficients
    whole      it takes whole numbers only
    scheduled  it rises and falls with lr: a step takes it times lr / (the lr that the group was made with)
    lr_if      the flag of groups whose rate it is: they take lr in its place, and are made with it as their lr if they
               have none of their own
    doc        its meaning in one line, for help() and the pages; that of the usual names (lr, betas ...) is known
    """
    _line(doc)
    if ge is not None and gt is not None or le is not None and lt is not None:
        raise _refuse("a range has one lower and one upper end", "give ge= or gt=, and le= or lt=")
    value: float | tuple[float, ...]
    for name, bound in (("ge=", ge), ("gt=", gt), ("le=", le), ("lt=", lt)):
        if bound is not None and math.isnan(_number(name, bound)):
            raise _refuse(f"{name} is a number, got nan", "")
    if series:
        try:
            value = plain(default, what="a hyper-parameter's default")
        except ValueError as error:
            raise _refuse(str(error), "") from None
    elif isinstance(default, tuple):
        if not default:
            raise _refuse("a tuple hyper-parameter has at least one part", "")
        value = tuple(_finite("a hyper-parameter's default", x) for x in default)
    elif isinstance(default, bool):
        value = default
    else:
        value = _finite("a hyper-parameter's default", default, "a number, or a tuple of numbers: hyper((0.9, 0.999))")
    return HyperDecl("", value, ge, gt, le, lt, rounds_of, whole, scheduled, lr_if, series=series, doc=doc)


def flag(
    default: bool = False,
    *,
    nonzero: str | None = None,
    every: str | None = None,
    first: bool = False,
    fed: str | None = None,
    needs: str | None = None,
    excludes: str | None = None,
    doc: str = "",
) -> Any:
    """A static switch, a real bool while the spec is traced.

    flag(False) is a constructor argument; flag(nonzero="momentum") holds where that hyper-parameter is not 0;
    flag(every="k") holds at the steps that are multiples of that hyper-parameter, a whole number; flag(first=True) at
    the first step of a parameter; with both at steps 1, k + 1, 2 k + 1 ...; flag(fed="x") at the steps for which the
    input x was fed, flag(fed="x and y") at those for which both were.

    needs, excludes  hyper-parameters without which, and with which, it must not be on: the constructor raises
    doc              its meaning when it is True, in one line
    """
    _line(doc)
    if not isinstance(default, bool):
        raise _refuse(f"a flag's default is True or False, got {default!r}", "")
    if fed is not None and not isinstance(fed, str):
        raise _refuse(f"fed= is the name of an input in quotes, got {fed!r}", 'of two inputs: fed="x and y"')
    follows = (nonzero is not None) + (every is not None) + first + (fed is not None)
    if follows - (first and every is not None) > 1 or follows and (needs or excludes or default):
        raise _refuse("a flag that follows something has nonzero=, fed=, or every= and first=, and nothing else", "")
    return FlagDecl("", default, nonzero, needs=needs, excludes=excludes, every=every, first=first, fed=fed, doc=doc)


def shape_flag(holds: Callable[..., bool]) -> Any:
    """A static switch decided per parameter from its shape, for instance lambda shape: len(shape) >= 2.

    Further arguments are hyper-parameters: lambda shape, max_dim: max(shape) <= max_dim.  Where no shape is known, it
    is what the function says of a matrix.
    """
    if not callable(holds):
        raise _refuse(f"shape_flag() takes a function of the shape, got {holds!r}", "")
    flag_of_shape = FlagDecl("", shape=holds)
    return flag_of_shape if flag_of_shape.limits else usual(flag_of_shape, {})


def usual(flag: FlagDecl, hypers: Mapping[str, Any]) -> FlagDecl:
    """A flag of shapes that is by default what its function says of a matrix, with hyper-parameters by their names."""
    what = f"shape_flag()'s function takes the shape and hyper-parameters, and `{{}}` is none: {', '.join(hypers)}"
    if unknown := [name for name in flag.limits if name not in hypers]:
        raise UserError("E113", loc=flag.loc, what=what.format(unknown[0]), hint="")
    try:
        return replace(flag, default=flag.holds((1024, 1024), hypers))
    except Exception as error:
        raise _refuse(f"shape_flag()'s function fails on the shape (1024, 1024): {error}", "") from error


def conditions(when: str | None) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """Return the conditions of `when`: alternatives, each the flags that must hold.

    "a and not b or c" -> ((("a", True), ("b", False)), (("c", True),))
    """
    out = []
    for part in when.split(" or ") if when else ():
        words = [word.strip() for word in part.split(" and ")]
        out.append(tuple((w.removeprefix("not ").strip(), not w.startswith("not ")) for w in words))
    return tuple(out)


def flags_in(when: str | None) -> tuple[str, ...]:
    """The names of the flags in `when`."""
    return tuple(name for part in conditions(when) for name, _ in part)
