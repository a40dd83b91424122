"""States in host memory: the host updates the weights of an accelerator, chunk by chunk.

For each chunk of parameters, weights and gradients are copied to pinned memory, the C++ backend makes the step there,
and the weights are copied back.  Copies of one chunk and the work on another go on at the same time: two buffers take
turns, and copies have streams of their own.  `step()` returns when the host has done its part; the last copies back are
waited for by the device, in its own order of work.

A step on the host has the bits of the C++ backend.  Parameters on the CPU are updated where they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding
from optgen.runtime.modes.mover import HOST, LINE, Mover, Place, lines, places, views
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant
from optgen.runtime.states import low_bits, state
from optgen.runtime.step import admit
from optgen.runtime.step.stepper import Stepper

CHUNK = 64 * 1024 * 1024
"""Bytes of weights and gradients that are on their way together; a larger parameter is a chunk of its own."""


class Chunk:
    """Parameters that the host steps together, by a stepper of their own.

    twins, grads   copies in a buffer of the weights, which are what is stepped, and of the gradients
    groups         the twins' groups, by the numbers of those of the parameters
    """

    def __init__(self, members: Sequence[Entry], mover: Mover) -> None:
        self.members, self.mover, self.stepper = members, mover, Stepper()
        made = views(mover.buffer(), [m.p for m in members] + [_grad(m) for m in members])
        self.twins, self.grads = made[: len(members)], made[len(members) :]
        self.groups: dict[int, dict[str, Any]] = {}
        for twin, m in zip(self.twins, members, strict=True):
            twin.grad_dtype = m.p.grad_dtype
            group = self.groups.setdefault(m.number, {key: [] for key in entries.OWN})
            for key, value in zip(entries.OWN, (twin, m.name, m.position), strict=True):
                group[key].append(value)

    def fetch(self) -> Any:
        """Start copies of weights and gradients to the host; return their event, if any."""
        read = [m.p for m in self.members] + [_grad(m) for m in self.members]
        return self.mover.fetch(list(zip(self.twins + self.grads, read, strict=True)))

    def step(self, owner: Owner) -> None:
        """Make the step, as the copies are there, and start the copies back; new states are the owner's."""
        pairs = list(zip(self.twins, self.members, strict=True))
        states = {twin: owner.states[m.p] for twin, m in pairs if owner.states.get(m.p)}
        for twin, m in pairs:
            if low_bits.ATTRIBUTE in m.p.__dict__:  # its state, made from the twin, takes them
                setattr(twin, low_bits.ATTRIBUTE, m.p.__dict__[low_bits.ATTRIBUTE])
        for number, group in self.groups.items():
            entries.take_options(group, owner.groups[number])
        for twin, g in zip(self.twins, self.grads, strict=True):
            twin.grad = g
        try:
            self.stepper.step(owner._replace(groups=list(self.groups.values()), states=states))
        finally:
            for twin, m in pairs:
                twin.grad, made = None, states.get(twin)
                if made is not None and owner.states.get(m.p) is not made:
                    owner.states[m.p] = made
                    low_bits.drop(m.p)
        self.mover.send([(m.p, twin) for twin, m in pairs])


class Offload:
    """The places of an optimizer's states, and the steps of groups with offload=True.

    resident   types of devices whose parameters stay where they are
    away       True while all states are in host memory (away.py), where no step is made
    arriving   events of copies to the host that may still run
    """

    def __init__(self, make: Callable[[torch.device], Mover] = Mover, resident: Sequence[str] = ("cpu",)) -> None:
        self._make, self.resident = make, resident
        self.away, self.arriving = False, list[Any]()
        self._movers: dict[torch.device, Mover] = {}
        self._known, self._chunks = list[object](), list[Chunk]()

    def part(self, e: Entry) -> Offload:
        """Return one for a parameter alone, whose gradient is released: all of these share the movers."""
        if self._leaves(e):
            self.mover(e.p.device, 2 * lines(e.p))
        made = copy.copy(self)
        made.away = False  # it only makes steps
        return made

    def mover(self, device: torch.device, size: int = 0) -> Mover:
        """Return the mover of a device, for a chunk of that many bytes."""
        if device not in self._movers:
            self._movers[device] = self._make(device)
        self._movers[device].largest = max(size, self._movers[device].largest)
        return self._movers[device]

    def arrive(self) -> None:
        """Wait for the copies of states to the host."""
        while self.arriving:
            if (event := self.arriving.pop()) is not None:
                event.synchronize()

    def forget_tables(self) -> None:
        """Free the memory that kernels need between stages, of every chunk."""
        for chunk in self._chunks:
            chunk.stepper.forget_tables()

    def _leaves(self, e: Entry) -> bool:
        """Return True if the host updates this parameter."""
        return bool(e.group.get("offload")) and e.p.device.type not in self.resident

    def settle(self, groups: Sequence[dict[str, Any]]) -> list[tuple[Entry, torch.device | None]]:
        """Put states that are made or read from now on where the groups want them.

        Returns (parameter, its home until now) for those for which that is another place.
        """
        changed: list[tuple[Entry, torch.device | None]] = []
        for e in entries.of(groups):
            before, away = state.home(e.p), self.away and e.p.device.type not in (*self.resident, "meta")
            on_host = away or (self._leaves(e) and not sharding.is_sharded(e.p))
            state.settle(e.p, HOST if on_host else None)
            if state.home(e.p) != before:
                changed.append((e, None if before == e.p.device else before))
        return changed

    def step(self, owner: Owner, stepper: Stepper) -> None:
        """Step every parameter that has a gradient: chunk by chunk if a group asks for it, else by the stepper."""
        if not self._chunks and not any(group.get("offload") for group in owner.groups):
            stepper.step(owner)
            return
        with torch.no_grad(), owner.uninterrupted:
            _check(owner, stepper)
            self._divide(owner, stepper)
            if self.settle(owner.groups):
                self.bring(owner)
                self.arrive()
            arrival = self._chunks[0].fetch() if self._chunks else None
            self._step_others(owner, stepper)
            for chunk, following in zip_longest(self._chunks, self._chunks[1:]):
                event, arrival = arrival, None if following is None else following.fetch()
                if event is not None:
                    event.synchronize()
                chunk.step(owner)

    def bring(self, owner: Owner, pin: bool = True, sums: Mapping[int, dict[str, Any]] | None = None) -> None:
        """Bring all that is kept of the parameters, and sums by id(parameter), to where they are to lie now."""
        by_device: dict[torch.device, list[Place]] = {}
        for place in places(owner, self.away, sums or {}):
            here = place.tensor.device
            if here != place.home or (here == HOST and HOST.type not in self.resident):
                by_device.setdefault(here if place.home == HOST else place.home, []).append(place)
        for device, found in by_device.items():
            self.arriving.append(self.mover(device).move(found, pin))

    def _step_others(self, owner: Owner, stepper: Stepper) -> None:
        """Step the parameters that stay: for the stepper the others have no gradients."""
        leaving = [(m.p, m.p.grad) for chunk in self._chunks for m in chunk.members]
        try:
            for p, _ in leaving:
                p.grad = None
            stepper.step(owner)
        finally:
            for p, g in leaving:
                p.grad = g

    def _divide(self, owner: Owner, stepper: Stepper) -> None:
        """Divide the parameters of the step into chunks; those of the step before stay if nothing is new."""
        leaving = [e for e in entries.of(owner.groups) if self._leaves(e) and _admitted(owner, stepper, e)]
        known = [(id(e.p), e.number, e.name, e.p.shape, e.p.device, e.p.dtype, _grad(e).dtype) for e in leaving]
        if known == self._known:
            return
        self._known, self._chunks = [], []
        if any(needs_model(owner, e) for e in leaving):
            raise ValueError(
                f"{owner.cls.__name__} needs sums over the whole model: offload=True steps it in parts; leave offload "
                f"out, or take a rule without such sums"
            )
        pairs = [(part, self.mover(part[0].p.device, sum(map(_bytes, part)))) for part in _parts(leaving)]
        self._chunks = [Chunk(part, mover) for part, mover in pairs]
        self._known = [*known]


def _parts(members: Sequence[Entry]) -> list[list[Entry]]:
    """Divide parameters by devices, and so that no part is larger than CHUNK if it can be."""
    parts, size = list[list[Entry]](), 0
    for e in members:
        size += _bytes(e)
        if not parts or parts[-1][0].p.device != e.p.device or size > CHUNK:
            parts.append([])
            size = _bytes(e)
        parts[-1].append(e)
    return parts


def _check(owner: Owner, stepper: Stepper) -> None:
    """Refuse what would be refused in the middle of a step."""
    stepper.refuse_numbers(owner)
    for group in owner.groups:
        options.hypers_of(owner.cls, group)
        if group.get("offload") and group["backend"] == "triton":
            why = "updates on the host, where backend='triton' does not run; take backend='auto'"
            raise ValueError(f"{owner.cls.__name__}: offload=True {why}")


def _admitted(owner: Owner, stepper: Stepper, e: Entry) -> bool:
    """Return True if the host steps a parameter now; raises an error if it is refused."""
    if e.p.grad is None:
        return False
    admit.check_pair(owner.cls, stepper.dtypes, e.p, e.p.grad, e.name)
    if sharding.is_sharded(e.p):
        raise NotImplementedError(
            f"{owner.cls.__name__}: offload=True does not move parts of tensors: {state.label(e.p, e.name)} is a "
            f"DTensor on {e.p.device}.  Let fully_shard keep it on the host (offload_policy=CPUOffloadPolicy()), or "
            f"leave offload=True out"
        )
    admit.in_memory(owner.cls, e.p, e.p.grad, e.name, False)
    return True


def sums_over_model(variant: Variant) -> bool:
    """Return True if a step needs sums over the model."""
    return bool(variant.model_temps) or any(f.space == "model" for f in variant.fields)


def needs_model(owner: Owner, member: Entry) -> bool:
    """Return True if a parameter's update needs sums over the model, at any step."""
    _, plan, variant = checkpoint.select(owner.cls, member.group, member.p, member.name)
    return any(sums_over_model(v) for v in plan.variants if v.param == variant.param)


def _grad(e: Entry) -> Tensor:
    assert e.p.grad is not None
    return e.p.grad


def _bytes(e: Entry) -> int:
    """Return the bytes of the cache lines of a weight and its gradient."""
    return max(LINE, lines(e.p) + lines(_grad(e)))
