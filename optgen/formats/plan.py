"""Plans: which format keeps what.  A plan knows traits (signed, nonneg), not optimizers; n rules x k plans need
no n * k lines.  `Plan.storage` joins a plan with the states of a rule."""

from __future__ import annotations

import dis
import keyword
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from types import FrameType, MappingProxyType
from typing import Any

from optgen.base import loc as locs
from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.base.names import is_text
from optgen.formats import floats
from optgen.formats.check import BLOCKS, is_whole, refusal
from optgen.formats.format import Field, Format, Master
from optgen.formats.masters import Native, SplitFp8
from optgen.formats.of_matrices import MATRICES, NEAREST
from optgen.formats.views import COLUMNS, VIEWS
from optgen.lang.declare import INPUT, StateDecl
from optgen.lang.spec import MatrixKind
from optgen.ops.dtypes import DType, f32

SMALL, SLOW = 4096, 0.98
WORD = 4  # bytes of the word that holds a view's scales of one storage block


def rounds_to_nearest(recurrence: Any) -> bool:
    """Return True if rounding "auto" means nearest for a state that recurs like this (an object with .kind and .decay).

    A running maximum without decay would climb on the upward halves of stochastic rounding, a running minimum sink on
    the downward ones; with decay a maximum must be able to sink by less than a cell, like an average.  A state
    that does not depend on its past has nothing to gain.  A residual of low rank comes before functions of whole
    matrices, which lift the noise of a store; rounding to nearest has half of it.
    """
    if recurrence.kind in ("max", "min"):
        return recurrence.decay is None or bool(recurrence.decay == 1)
    return recurrence.kind in ("previous", "constant", "residual")


def coded_trait(state: StateDecl, recurrence: Any) -> str:
    """Return the trait by which plans of `matrices=8` keep a matrix state; "" where it stays fp32.

    These are symmetric states that recur like slow averages (to nearest, one of decay b does not follow changes of
    1 / (254 (1 - b)) of a block's largest number, a fifth from SLOW on), and states of low rank that declare nothing
    and are no averages, or have rank 1.
    """
    kind = None if recurrence is None else recurrence.kind
    if state.rank and state.trait != "orthogonal":
        average = state.normalized_by or state.nonneg or kind == "ema"
        if state.rank == 1 or not average or kind in ("max", "min", "sum"):
            return ""
        return "low_rank_nonneg" if state.nonneg else "low_rank"
    if state.trait != "symmetric" or kind in (None, "previous", "constant"):
        return state.trait
    fast = kind == "ema" and recurrence.decay is not None and recurrence.decay < SLOW
    return state.trait if fast else ""


@dataclass(frozen=True)
class Storage:
    """A plan applied to the states of one rule: what `lower` compiles, `runtime` allocates and `lint` judges.

    param    the parameter's dtype
    states   name -> format, every rounding resolved
    nonneg   names of the states that are never negative
    """

    plan: Plan
    param: DType
    master: Master
    states: dict[str, Format]
    nonneg: frozenset[str] = frozenset()

    @property
    def matrix(self) -> MatrixKind | None:
        """The matrix that the formats' rows and columns belong to: the last two dimensions, if one asks for them."""
        wanted = {f.matrix for f in self.states.values()} - {None}
        return "last" if "last" in wanted else "first" if wanted else None

    @property
    def block(self) -> int:
        """The block size that all blocked states share; 1 where there is none."""
        return max((f.block for f in self.states.values()), default=1)

    def fields(self) -> dict[str, Field]:
        """Every stored tensor but the parameter: "weight_<suffix>", then "<state>" or "<state>_<suffix>"."""
        out = {f"weight_{k}": v for k, v in self.master.fields(self.param).items() if k}
        for name, fmt in self.states.items():
            fields = fmt.fields()
            out |= {key: fields[k] for k, key in field_names(name, fields).items()}
        return out

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter between steps: weight, states and views, without the gradient."""
        views = sum(VIEWS[name].bytes_per_param for name in self.plan.views)
        return self.param.bytes + sum(f.bytes_per_param for f in self.fields().values()) + views


CODES = "codes"
"""The suffix, in opt.state[p], of what a format keeps under "" where those are no numbers of the state itself."""


def field_names(owner: str, fields: Mapping[str, Field]) -> dict[str, str]:
    """Suffix -> key in opt.state[p]: the owner's name and the suffix.

    Under a state's own name stands only what is the state as it is, in floats: torch.optim would read codes as such.
    """
    plain = len(fields) == 1 and all(f.dtype.is_float for f in fields.values())
    return {k: f"{owner}_{k or CODES}" if k or not plain else owner for k in fields}


def _assigned_name(frame: FrameType) -> str:
    """The name that the running instruction's result is assigned to, read from the bytecode; "" if none."""
    after = (i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    following = next((i for i in after if i.opname != "CACHE"), None)
    return str(following.argval) if following and following.opname.startswith("STORE_") else ""


def _first_frame_outside() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "dataclasses"):
        frame = frame.f_back
    return frame


def _check_overrides(overrides: object, loc: Loc) -> None:
    got = "" if overrides is None or isinstance(overrides, Mapping) else f"a {type(overrides).__name__}"
    if isinstance(overrides, Mapping):
        got = next((f"the key {key!r}" for key in overrides if not isinstance(key, str)), "")
    if got:
        want, hint = "a dict: the name of a state -> its format", "Plan(..., overrides=dict(exp_avg=Blocked()))"
        raise UserError("E309", loc=loc, part="overrides", want=want, got=got, hint=hint)


def _are_views(views: object) -> bool:
    if not isinstance(views, (tuple, list)):
        return False
    return all(isinstance(x, str) and x in VIEWS for x in views) and len(set(views)) == len(views)


def _nameable(name: str) -> bool:
    """Return True if a folder and a Python module can have this name; "" is a plan's that has none."""
    plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return not name or plain and not name.startswith("__")


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A choice of how every kind of value is kept between steps.

        int8 = Plan("8-bit moments.", signed=Blocked(), nonneg=LogMinMax())

    name         by default the name it is assigned to
    master       the weight, where the parameter is narrower than fp32
    signed       states of either sign; a relative format applies where the rule divides the state by the root of
                 a second moment that never becomes 0, its absolute twin elsewhere
    nonneg       states that are never negative
    initial      states that start as the weight: precise as weights, not as moments
    small_numel  tensors of fewer elements (of the logical tensor) keep every state in fp32
    matrices     bits of matrix states: 8 for those of a trait and averages of low rank (OfMatrix), or 32
    views        names of further encodings of the weight that each step writes and none reads (formats/views.py)
    overrides    state name -> format, before all of these; of small tensors in its form for vectors (Format.of_vectors)
    discouraged  why the plan exists although the lint finds an error; "": such a plan is refused
    """

    doc: str
    _: KW_ONLY
    name: str = ""
    master: Master = field(default_factory=Native)
    signed: Format = floats.f32
    nonneg: Format = floats.f32
    initial: Format = floats.f32
    small_numel: int = SMALL
    matrices: int = 32
    views: Sequence[str] = ()
    overrides: Mapping[str, Format] = field(default_factory=dict)
    discouraged: str = ""
    small: Format = field(default=floats.f32, init=False)
    loc: Loc = field(default_factory=lambda: locs.of_frame(_first_frame_outside()), init=False)

    def __post_init__(self) -> None:
        _check_overrides(self.overrides, self.loc)
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides or {})))
        if self.name == "":
            object.__setattr__(self, "name", _assigned_name(_first_frame_outside()))
        self._check()

    def _check(self) -> None:
        self._check_words()
        slots = {name: getattr(self, name) for name in ("signed", "nonneg", "initial")}
        for slot, value in (slots | {f"overrides[{k!r}]": v for k, v in self.overrides.items()}).items():
            if not isinstance(value, Format):
                raise self._not_a(slot, value, "one such as floats.bf16, Blocked() or LogMinMax()", Format)
        if not isinstance(self.master, Master):
            raise self._not_a("master", self.master, "one of those for weights, such as Native() or Split(8)", Master)
        if self.views and isinstance(self.master, SplitFp8):
            raise refusal(self.loc, "views beside SplitFp8()", "one of them: layers see 8 bits of these weights")
        for slot, fmt, what in (
            ("signed", self.signed, "it keeps the states of either sign"),
            ("initial", self.initial, "it keeps states that start as the weight"),
        ):
            if not fmt.signed:
                name = f"plan {self.name}" if self.name else "this plan"
                raise UserError(
                    "E301", loc=self.loc, what=f"`{slot}` of {name} is an unsigned format: {fmt}",
                    note=f"{what}, which may be negative: a negative value could not be told from a positive one",
                    hint="give it a signed format, or name the states that it is for in `overrides`",
                )  # fmt: skip
        if self.initial.block > 1 or self.initial.matrix is not None:
            raise refusal(self.loc, f"initial={self.initial}", "a format without blocks, rows and columns there")

    def _check_words(self) -> None:
        name = "a Python name (not one such as __init__): it becomes a module"
        for part, fits, want in (
            ("doc", is_text(self.doc), "a text, the first argument"),
            ("name", isinstance(self.name, str) and _nameable(self.name), name),
            ("small_numel", is_whole(self.small_numel) and self.small_numel >= 0, "a number of elements, 0 or more"),
            ("matrices", is_whole(self.matrices) and self.matrices in (8, 32), "the bits of matrix states, 8 or 32"),
            ("discouraged", is_text(self.discouraged), "the reason, a text"),
            ("views", _are_views(self.views), f"a tuple of names, each once: {', '.join(VIEWS)}"),
        ):
            if not fits:
                raise UserError("E309", loc=self.loc, part=part, want=want, got=repr(getattr(self, part)))

    def _not_a(self, slot: str, value: object, want: str, kind: type) -> UserError:
        called = isinstance(value, type) and issubclass(value, kind)
        got = value.__name__ if isinstance(value, type) else repr(value)
        hint = "from optgen.formats import Blocked, LogMinMax, Native, Split, floats"
        hint = f"call it: {got}(...)" if called else hint
        return UserError("E305", loc=self.loc, what=f"{slot}={got}", want=want, hint=hint)

    def check_name(self) -> None:
        """UserError for a plan that was not assigned to a name as it was made: it becomes a folder, and groups and
        checkpoints call it by its name."""
        if not self.name:
            hint = 'assign it first (mine = Plan(...)), or give it one: Plan(..., name="mine")'
            want = "what groups and checkpoints call it"
            raise UserError("E309", loc=self.loc, part="name", want=want, got="none", hint=hint)

    def but(self, doc: str = "", **changes: Any) -> Plan:
        """This plan with some of its parts replaced; `overrides` are added to the ones it has."""
        frame = _first_frame_outside()
        _check_overrides(changes.get("overrides"), locs.of_frame(frame))
        changes["overrides"] = {**self.overrides, **(changes.get("overrides") or {})}
        changes.setdefault("name", _assigned_name(frame))
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name not in ("doc", "name")}
        return Plan(doc or self.doc, **{**own, **changes})

    def __repr__(self) -> str:
        return f"Plan({self.name!r})"

    # -- applied to a rule

    def storage(
        self,
        states: Sequence[StateDecl],
        param: DType,
        small: bool,
        recurrences: Mapping[str, Any] | None = None,
        *,
        vector: bool = False,
    ) -> Storage:
        """The formats of these states (those present under the flags), for a parameter dtype and size class.

        `vector`: for tensors of fewer than two dimensions; the formats of others may need rows and columns.

        `recurrences` gives each state's recurrence: by it rounding "auto" becomes nearest or stochastic
        (`rounds_to_nearest`; stochastic where it is not given).  Raises UserError where a format cannot hold a
        state.
        """
        chosen: dict[str, Format] = {}
        for state in states:
            chosen[state.name] = self._resolved(state, small, vector, recurrences)
        by_name = {s.name: s for s in states}
        for state in states:
            base = by_name.get(state.normalized_by or "")
            if chosen[state.name].relative and (base is None or not chosen[base.name].positive):
                chosen[state.name] = chosen[state.name].absolute()
        self._check_states(states, chosen)
        master = Native() if param is f32 else self.master
        self._check_fields(states, chosen, master, param)
        nonneg = frozenset(s.name for s in states if s.nonneg)
        return Storage(self, param, master, chosen, nonneg)

    def _resolved(self, state: StateDecl, small: bool, vector: bool, recurrences: Mapping[str, Any] | None) -> Format:
        recurrence = (recurrences or {}).get(state.name)
        fmt = self._format(state, small, recurrence)
        # Small tensors are one class, vectors and matrices: what `overrides` keep of them may need no rows and columns.
        if vector or small:
            fmt = fmt.of_vectors()
        if fmt.rounding != "auto":
            return fmt
        nearest = recurrence is not None and rounds_to_nearest(recurrence)
        return fmt.rounded("nearest" if nearest else "stochastic")

    @property
    def of_matrices(self) -> Mapping[str, Format]:
        """The formats of matrix states in 8 bits by their traits, to nearest where moments are."""
        nearest = self.signed != floats.f32 and not self.signed.noise_bits and not self.nonneg.noise_bits
        return NEAREST if nearest else MATRICES

    def _format(self, state: StateDecl, small: bool, recurrence: Any) -> Format:
        if state.trait == INPUT:
            return floats.f32
        if state.name in self.overrides:
            return self.overrides[state.name]
        if state.space.name != "elem":
            trait = coded_trait(state, recurrence) if self.matrices == 8 and not small else ""
            return self.of_matrices.get(trait, floats.f32)
        if state.init == "param":
            return self.initial
        if small:
            return self.small
        return self.nonneg if state.nonneg else self.signed

    def _check_fields(
        self, states: Sequence[StateDecl], chosen: Mapping[str, Format], master: Master, param: DType
    ) -> None:
        """No two tensors of opt.state[p] may share a name."""
        taken = {f"weight_{k}": "the weight" for k in master.fields(param) if k}
        # Under its own name a state is what its author wrote; a suffix is what the plan adds to it.
        for state in sorted(states, key=lambda s: len(s.name)):
            for name in field_names(state.name, chosen[state.name].fields()).values():
                what = f"a part of `{state.name}`"
                if name in taken:
                    places = tuple(x for x in (state.loc, self.loc) if x is not None)
                    second = f"state `{name}`" if name == state.name else what
                    raise UserError(
                        "E308", loc=places, plan=self.name, first=taken[name], second=second, field=name
                    )  # fmt: skip
                taken[name] = f"state `{name}`" if name == state.name else what

    def _check_states(self, states: Sequence[StateDecl], chosen: Mapping[str, Format]) -> None:
        sizes = self.master.blocks
        for state in states:
            fmt = chosen[state.name]
            places = tuple(x for x in (self.loc, state.loc) if x is not None)
            if not state.nonneg and not fmt.signed:
                what = f"plan {self.name} keeps the signed state `{state.name}` in an unsigned format: {fmt}"
                raise UserError("E301", loc=places, what=what)
            if state.space.name != "elem" and fmt not in (floats.f32, *self.of_matrices.values()):
                space = state.space.name
                raise UserError("E303", loc=places, plan=self.name, state=state.name, space=space, format=fmt)
            if state.init == "param" and fmt.matrix is not None:
                what = f"`{state.name}`, which starts as the weight, kept as {fmt}"
                raise refusal(places, what, "a format that needs no rows and columns")
            if fmt.block not in (1, *BLOCKS):  # of fewer elements than lanes C++ kernels would mix the scales
                what = f"`{state.name}` in blocks of {fmt.block}, by {type(fmt).__name__},"
                raise refusal(places, what, f"blocks of a power of two, {BLOCKS[0]} to {BLOCKS[-1]}")
            if fmt.block > 1:
                sizes.setdefault(fmt.block, state.name)
        self._check_views(sizes)
        if len(sizes) > 1:
            (a, first), (b, second) = sorted(sizes.items())[:2]
            given = {"plan": self.name, "first": first, "a": a, "second": second, "b": b}
            if any(fmt.matrix is not None for fmt in (self.signed, self.nonneg, *self.overrides.values())):
                given["hint"] = (
                    "use one block size; of Rank1 and Factored `vectors` says it, which is for tensors without rows "
                    "and columns"
                )
            raise UserError("E302", loc=self.loc, **given)

    def _check_views(self, blocks: Collection[int]) -> None:
        """UserError where storage blocks hold no whole blocks of a view, or more than one word has scales of."""
        for name, size in ((x, VIEWS[x].block) for x in self.views if VIEWS[x] is not COLUMNS):
            if any(block % size or block // size > WORD for block in blocks):
                what = f"the view {name} beside states in blocks of {max(blocks)}"
                raise refusal(self.loc, what, f"blocks of {' or '.join(str(size * k) for k in (1, 2, 4))} there")
