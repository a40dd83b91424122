"""How far two stored results of one step may lie apart, derived from the code that made them.

A kernel computes in fast maths what the eager reference computes in strict maths, then both round with the same
random bits.  Two things may differ: the value before it is rounded, by what fast maths is allowed; and then, where
a rounding edge lies between the two values, the stored code.

Before rounding.  The rule's own sensitivity is measured: its fp32 plan stores what it computes, so its strict
reference, run on the decoded state with one input after the other (weight, gradient, each state, each host scalar)
made larger and smaller by a relative `reach`, gives to first order how far errors of that size in the operations
that follow each input can move each result.  One operation of the author may become up to eight roundings in fast
maths (see optgen.verify.intervals.FAST); at most 16 operations lie between an input and what is stored, 4 between
the weight and itself.

After rounding.  A stored value lies within one cell of what was rounded, so two stored values differ by at most one
cell of each and the difference before: the bound that every element is held to.  Cells are found by decoding the
neighbouring codes.  That alone would pass a kernel that always rounds wrongly, so codes are counted as well: two
values that differ by d before rounding get different codes with probability d / cell, which gives the number to be
expected; before rounding, `TYPICAL` of what is allowed is what an average chain is off by.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optgen.runtime import layout, plans
from optgen.runtime.records import Field, Variant

HALF_ULP = 2.0**-24
OPERATION = 8 * HALF_ULP  # one operation of the author in fast maths
REACH = 16 * OPERATION
REACH_OF_WEIGHT = 4 * OPERATION
TYPICAL = 2.0**-6  # of REACH, 2^-17: an average chain is off by an ulp, 2^-23
FLUSHED = 2.0**-120  # subnormal operands may read as 0: 2^-126, times what a rule multiplies it by
ON_AN_EDGE = 1 / 32  # share of headers that may differ anyhow: a block's largest may be a round number
SIGMAS, EVENTS = 6.0, 4.0  # what chance may add to a count: six deviations, and a few where hardly any are expected

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Stored:
    """One parameter as kept, on the CPU: the weight, the fields, and the host's part of the state."""

    p: Tensor
    fields: Values
    step: int
    host: dict[str, float]

    def bits(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in {"p": self.p, **self.fields}.items():
            yield name, value.reshape(-1).view(torch.uint8)

    def same_bits(self, other: Stored) -> list[str]:
        """Names of what differs; NaN equals NaN of the same bits only."""
        pairs = zip(self.bits(), other.bits(), strict=True)
        return [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]


def decode(module: ModuleType, variant: Variant, stored: Stored, only: Sequence[str] | None = None) -> Values:
    """fp32 "p" and states, as kept."""
    wanted = ("p", *variant.states) if only is None else tuple(only)
    return layout.decode(module, variant, stored.p, stored.fields, wanted)


# Before rounding ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The rule without storage: the strict reference of the class' fp32 plan for fp32 parameters."""

    function: Callable[..., None]
    variant: Variant

    @classmethod
    def of(cls, generated: Any, flags: tuple[tuple[str, bool], ...]) -> Rule | None:
        """None where the class was not built under a plan named fp32."""
        if "fp32" not in generated.PLANS:
            return None
        module = plans.load(generated, "fp32")
        variant = plans.variant(module, torch.float32, False, flags)
        return cls(getattr(plans.part(module, "reference"), variant.step_name), variant)

    def scalars(self, step: int, sign: float, hypers: Mapping[str, Any], host: Mapping[str, float]) -> list[float]:
        """The host scalars of step number `step`, rounded to fp32."""
        given = {name: host[name] for name in self.variant.host_names}
        values = self.variant.host(step, sign, **hypers, **given)[: len(self.variant.scalars)]
        return [ctypes.c_float(value).value for value in values]

    def run(self, before: Mapping[str, Tensor], g: Tensor, scalars: Sequence[float]) -> Values:
        """One step from decoded values, not rounded to anything: "p" and the states."""
        after = {name: value.clone() for name, value in before.items()}
        self.function(after["p"], g, *(after[f.name] for f in self.variant.fields), *scalars, 0, 0)
        return after


def allowance(rule: Rule, before: Mapping[str, Tensor], g: Tensor, scalars: Sequence[float]) -> Values:
    """How far fast maths may move each result before it is rounded; shapes as the values'."""
    exact = rule.run(before, g, scalars)
    moved = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in exact.items()}

    def add(change: Callable[[float], Values]) -> None:
        sides = [change(1.0), change(-1.0)]
        for name, total in moved.items():
            total += torch.maximum(*((side[name].double() - exact[name].double()).abs() for side in sides))

    for name, value in before.items():
        reach = REACH_OF_WEIGHT if name == "p" else REACH
        add(partial(_change_state, rule, before, g, scalars, name, value * reach))
    add(lambda s: rule.run(before, g * (1 + s * REACH), scalars))
    for k, scalar in enumerate(scalars):
        if scalar != 0:
            add(partial(_change_scalar, rule, before, g, scalars, k))
    for name, total in moved.items():
        # A rule may not feel the size of an input (Adam's first step does not feel the gradient's), but its
        # operations round all the same: the result as one operation, the change that it made as a whole chain.
        total += OPERATION * exact[name].double().abs()
        total += REACH * (exact[name].double() - before[name].double()).abs() + FLUSHED
    return moved


def _change_state(
    rule: Rule, before: Mapping[str, Tensor], g: Tensor, scalars: Sequence[float], name: str, by: Tensor, sign: float
) -> Values:
    return rule.run({**before, name: before[name] + sign * by}, g, scalars)


def _change_scalar(
    rule: Rule, before: Mapping[str, Tensor], g: Tensor, scalars: Sequence[float], k: int, sign: float
) -> Values:
    changed = scalars[k] * (1 + sign * REACH)
    return rule.run(before, g, [*scalars[:k], changed, *scalars[k + 1 :]])


# After rounding -------------------------------------------------------------------------------------------------------


def finest(variant: Variant, owner: str) -> Field | None:
    """The elementwise field that decides the last places of what `owner` keeps; None: the parameter itself."""
    fields = [f for f in variant.fields if f.owner == owner and f.per == 1]
    return fields[-1] if fields else None


def cells(module: ModuleType, variant: Variant, stored: Stored, owner: str, value: Tensor) -> Tensor | None:
    """How far it is to the neighbouring codes, per element; None where fp32 is kept as it is."""
    field_ = finest(variant, owner)
    dtype = stored.p.dtype if field_ is None else field_.torch_dtype
    if dtype == torch.float32:
        return None
    width = torch.zeros(value.shape, dtype=torch.float64)
    codes = stored.p if field_ is None else stored.fields[field_.name]
    for neighbour in _neighbours(codes):
        changed = (
            Stored(neighbour, stored.fields, stored.step, stored.host)
            if field_ is None
            else Stored(stored.p, {**stored.fields, field_.name: neighbour}, stored.step, stored.host)
        )
        other = decode(module, variant, changed, [owner])[owner]
        width = torch.maximum(width, (other.double() - value.double()).abs())
    return width


def _neighbours(codes: Tensor) -> list[Tensor]:
    """The codes after and before; of floats only the one away from 0, which is never nearer than the other."""
    if codes.is_floating_point():
        return [(codes.contiguous().view(torch.int16) + 1).view(codes.dtype)]
    info = torch.iinfo(codes.dtype)
    wide = codes.to(torch.int32)
    return [(wide + d).clamp(info.min, info.max).to(codes.dtype) for d in (1, -1)]


def _spread(x: Tensor, per: int, shape: torch.Size) -> Tensor:
    """What there is one of for each block, for each element."""
    return x.repeat_interleave(per, 1)[:, : layout.grid(shape)[1]].reshape(shape)


@dataclass
class Count:
    """How often something happened, how often it had to be expected, and of how many."""

    seen: int = 0
    expected: float = 0.0
    of: int = 0

    def add(self, seen: int, expected: float, of: int) -> None:
        self.seen += seen
        self.expected += expected
        self.of += of

    @property
    def limit(self) -> float:
        return self.expected + SIGMAS * math.sqrt(self.expected) + EVENTS

    @property
    def ok(self) -> bool:
        return self.seen <= self.limit


@dataclass
class Verdict:
    """What comparing a kernel with the reference found, over all tensors and steps.

    worst     per value: the largest distance as a share of its bound
    codes     per field: elements (or blocks) with another code
    problems  what is wrong, in words
    """

    worst: dict[str, float] = field(default_factory=dict)
    codes: dict[str, Count] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    elements: int = 0

    def finish(self) -> None:
        """Judges the counts, which only make sense over everything."""
        for name, count in self.codes.items():
            if not count.ok:
                self.problems.append(
                    f"{name}: {count.seen} of {count.of} codes differ, at most {count.limit:.0f} are explained"
                )

    def compare(
        self, module: ModuleType, variant: Variant, kernel: Stored, reference: Stored, allowed: Values, where: str
    ) -> None:
        """One tensor after one step that both made from the same state.

        allowed   what `allowance` gives for it
        """
        if kernel.p.numel() == 0:
            return
        self.elements += kernel.p.numel()
        ours, theirs = decode(module, variant, kernel), decode(module, variant, reference)
        flips: dict[str, Tensor] = {}
        for owner in ("p", *variant.states):
            a, b, move = ours[owner].double(), theirs[owner].double(), allowed[owner]
            bound, cell = move, cells(module, variant, reference, owner, theirs[owner])
            other = cells(module, variant, kernel, owner, ours[owner])
            if cell is not None and other is not None:
                bound = move + cell + other
                flips[owner] = (move * TYPICAL / cell).nan_to_num(nan=0.0, posinf=1.0).clamp(max=1.0)
            self._hold(owner, a, b, bound, where)
        if reference.p.dtype != torch.float32:
            self._hold_visible(kernel.p, reference.p, (ours["p"] - theirs["p"]).abs(), allowed["p"], where)
        self._count(variant, kernel, reference, theirs, allowed, flips)

    def _hold(self, owner: str, a: Tensor, b: Tensor, bound: Tensor, where: str) -> None:
        distance = (a - b).abs()
        same = (a == b) | (a.isnan() & b.isnan())
        ratio = torch.where(same, 0.0, distance / bound).nan_to_num(nan=math.inf)
        worst = float(ratio.max())
        self.worst[owner] = max(self.worst.get(owner, 0.0), worst)
        if worst > 1:
            k = int(ratio.argmax())
            got, want, limit = (float(x.reshape(-1)[k]) for x in (a, b, bound))
            self.problems.append(
                f"{owner} of {where}: element {k} is {got:.9g}, the reference {want:.9g}: apart by "
                f"{abs(got - want):.3g}, at most {limit:.3g} is explained ({int((ratio > 1).sum())} such elements)"
            )

    def _hold_visible(self, a: Tensor, b: Tensor, kept: Tensor, allowed: Tensor, where: str) -> None:
        """The narrow weight that the model sees rounds the kept one: within one of its own cells."""
        got, want = a.double(), b.double()
        cell = (_neighbours(b)[0].double() - want).abs()
        self._hold("visible weight", got, want, cell + kept.double() + allowed, where)

    def _count(
        self,
        variant: Variant,
        kernel: Stored,
        reference: Stored,
        values: Values,
        allowed: Values,
        flips: Mapping[str, Tensor],
    ) -> None:
        """Counts other codes, where the headers of the block and the states it may be relative to are the same."""
        differs: dict[str, Tensor] = {}
        near = torch.zeros(kernel.p.shape, dtype=torch.bool)  # under a header of fp32 that is another
        for f in variant.fields:
            other = kernel.fields[f.name] != reference.fields[f.name]
            if f.per > 1:
                pair = kernel.fields[f.name], reference.fields[f.name]
                spread = partial(_spread, per=f.per, shape=kernel.p.shape)
                if f.torch_dtype == torch.float32 and f.owner != "p":
                    near |= spread(other)
                other = spread(self._count_blocks(f, pair, variant, values, allowed, flips))
            differs[f.name] = other
        for owner, expected in flips.items():
            chosen = finest(variant, owner)
            name = "p" if chosen is None else chosen.name
            own = kernel.p != reference.p if chosen is None else differs[name]
            excluded = torch.zeros_like(own)
            if owner != "p":
                for f in variant.fields:
                    if f.name != name and f.owner != "p":
                        excluded |= differs[f.name]
            if owner != "p":  # codes move with such a header, by all of its distance and not an average one
                expected = torch.where(near, (expected / TYPICAL).clamp(max=1.0), expected)
            live = ~excluded
            count = self.codes.setdefault(name, Count())
            count.add(int((own & live).sum()), float(expected[live].sum()), int(live.sum()))

    def _count_blocks(
        self,
        f: Field,
        pair: tuple[Tensor, Tensor],
        variant: Variant,
        values: Values,
        allowed: Values,
        flips: Mapping[str, Tensor],
    ) -> Tensor:
        """Headers only steer the codes, whose values are held one by one; wrong ones would differ everywhere.

        They have at most 11 bits after the leading one; what decides them is a block's largest or smallest
        value.  Of a state kept relative to another, that may be any element whose other code differs: those that
        were rounded down the furthest, so are the nearest to an edge, are the largest.

        Headers of fp32 are not rounded to anything, and any two differ in the last places: of those, the ones count
        that lie further apart than their block's largest value may.

        pair     what the kernel and what the reference have stored
        returns  which headers are others
        """
        ours, theirs = pair
        other = ours != theirs
        signed, move = values[f.owner].double(), allowed[f.owner] * TYPICAL
        value = signed.abs()
        relative = torch.where(value > 0, move / value, 0.0).clamp(max=1.0)
        rows, columns = layout.grid(value.shape)

        def split(x: Tensor, fill: float) -> Tensor:
            short = other.shape[1] * f.per - columns
            padded = torch.nn.functional.pad(x.reshape(rows, columns), (0, short), value=fill)
            return padded.reshape(rows, other.shape[1], f.per)

        ends = [split(value, -1.0).argmax(-1, keepdim=True)]
        if bool((signed >= 0).all()):
            ends.append(split(value, math.inf).argmin(-1, keepdim=True))
        if f.torch_dtype == torch.float32:
            reach = torch.where(value > 0, allowed[f.owner] / value, 0.0).clamp(max=1.0)
            far = split(reach, 0.0).gather(-1, ends[0])[..., 0] + OPERATION
            other &= (ours.double() - theirs.double()).abs() > far * theirs.double().abs()
        by_others = f.per * sum(float(x.mean()) for name, x in flips.items() if name not in ("p", f.owner))
        moved = sum(split(relative, 0.0).gather(-1, at)[..., 0] * 2**12 + by_others for at in ends)
        count = self.codes.setdefault(f.name, Count())
        expected = float(torch.as_tensor(moved).clamp(max=1.0).sum()) + ON_AN_EDGE * other.numel()
        count.add(int(other.sum()), expected, other.numel())
        return other
