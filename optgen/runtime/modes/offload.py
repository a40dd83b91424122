"""States in host memory: the host updates the weights of an accelerator, chunk by chunk.

For each chunk of parameters, weights and gradients are copied to pinned memory, the C++ backend makes the step there,
and the weights are copied back.  Copies of one chunk and the work on another go on at the same time: two buffers take
turns, and copies have streams of their own.  `step()` returns when the host has done its part; the last copies back are
waited for by the device, in its own order of work.

A step on the host has the bits of the C++ backend.  Parameters on the CPU are updated where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding
from optgen.runtime.options import entries, options
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import Variant
from optgen.runtime.records.arena import LINE
from optgen.runtime.states import low_bits, state
from optgen.runtime.step import admit
from optgen.runtime.step.stepper import Stepper
from optgen.runtime.work import counting

CHUNK = 64 * 1024 * 1024
"""Bytes of weights and gradients that are on their way together; a larger parameter is a chunk of its own."""

Pair = tuple[Tensor, Tensor]
"""(written, read)."""


class Mover:
    """Copies between any device and the host, done when they return."""

    def room(self, size: int) -> Tensor:
        """Allocate host memory of that many bytes."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def fetch(self, pairs: Sequence[Pair]) -> Any:
        """Start copies to the host, after all work that the device was given so far; return a token for `wait`."""
        for written, read in pairs:
            written.copy_(read)

    def wait(self, token: Any) -> None:
        """Wait until those copies are done."""

    def send(self, pairs: Sequence[Pair]) -> None:
        """Start copies to the device, for which all work waits that it is given from now on."""
        for written, read in pairs:
            written.copy_(read)


class Cuda(Mover):
    """Copies on two streams beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for written, read in pairs:
                written.copy_(read, non_blocking=True)
                for tensor in (written, read):
                    if tensor.is_cuda:  # its memory is not to be used again before the copy is done
                        tensor.record_stream(stream)
            event: torch.cuda.Event = stream.record_event()
            return event

    def fetch(self, pairs: Sequence[Pair]) -> torch.cuda.Event:
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        return self._copy(self.down, pairs)

    def wait(self, token: torch.cuda.Event) -> None:
        token.synchronize()

    def send(self, pairs: Sequence[Pair]) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._copy(self.up, pairs))


def mover(device: torch.device) -> Mover:
    return Cuda(device) if device.type == "cuda" else Mover()


class Chunk:
    """Parameters that are stepped together, by a stepper of their own.

    room     the host memory for their weights and gradients; None if they stay
    twins    the tensors that are stepped: in that memory, or the parameters themselves
    sums     True if the rule sums over the model: then the stepper also sees states of parameters without a gradient
    """

    def __init__(self, owner: Owner, members: Sequence[Entry], room: Tensor | None, sums: bool) -> None:
        self.members, self.room, self.sums = members, room, sums
        self.twins: list[Tensor] = [] if room is not None else [m.p for m in members]
        self.grads: list[Tensor] = []
        end = 0
        for m in members if room is not None else ():
            assert room is not None and m.p.grad is not None
            for like, views in ((m.p, self.twins), (m.p.grad, self.grads)):
                views.append(room[end : end + like.nbytes].view(like.dtype).view(like.shape))
                end += _lines(like.nbytes)
            self.twins[-1].grad_dtype = m.p.grad_dtype
        self.numbers = list(dict.fromkeys(m.number for m in members))
        self.groups: list[dict[str, Any]] = []
        for number in self.numbers:
            inside = [(t, m.name, m.position) for t, m in zip(self.twins, members, strict=True) if m.number == number]
            self.groups.append({key: [x[k] for x in inside] for k, key in enumerate(entries.OWN)})
        self.stepper = Stepper()
        self.states: dict[Any, Any] = {}
        groups, cls = owner.groups, owner.cls
        found = {id(plan): plan for m in members for plan in [checkpoint.select(cls, groups[m.number], m.p, m.name)[1]]}
        self.stored = frozenset(f.name for plan in found.values() for v in plan.variants for f in v.fields)

    def open(self, owner: Owner) -> None:
        """Take over options and states as they are now."""
        for number, group in zip(self.numbers, self.groups, strict=True):
            entries.take_options(group, owner.groups[number])
            group["offload"] = False
        kept: dict[Any, Any] = {}
        for m, twin in zip(self.members, self.twins, strict=True):
            hosted = self.room is not None
            state.settle(m.p, torch.device("cpu") if hosted else None)
            if hosted and low_bits.ATTRIBUTE in m.p.__dict__:  # its state, made from the twin, takes them
                setattr(twin, low_bits.ATTRIBUTE, m.p.__dict__[low_bits.ATTRIBUTE])
            entry = owner.states.get(m.p)
            if entry:
                here = state.home(m.p)
                for name, value in entry.items():
                    if isinstance(value, Tensor) and name in self.stored and value.device != here:
                        entry[name] = value.to(here)
                kept[twin] = entry
        if self.sums:
            inside = {m.p for m in self.members}
            kept.update((p, entry) for p, entry in owner.states.items() if p not in inside)
        self.states = kept

    def fetch(self, move: Mover) -> Any:
        """Start copies of weights and gradients to the host; return a token for `step`."""
        pairs = [(twin, m.p) for twin, m in zip(self.twins, self.members, strict=True)]
        pairs += [(g, m.p.grad) for g, m in zip(self.grads, self.members, strict=True) if m.p.grad is not None]
        return move.fetch(pairs)

    def step(self, owner: Owner, move: Mover | None = None, token: Any = None) -> None:
        """Make the step; states that were made belong to the owner.

        move, token   of a chunk that leaves: its copies to the host, which are waited for first
        """
        if move is not None:
            move.wait(token)
            for twin, g in zip(self.twins, self.grads, strict=True):
                twin.grad = g
        try:
            self.stepper.step(owner._replace(groups=self.groups, states=self.states))
        finally:
            for m, twin in zip(self.members, self.twins, strict=True):
                made = self.states.get(twin)
                if made is not None and owner.states.get(m.p) is not made:
                    owner.states[m.p] = made
                    low_bits.drop(m.p)
                if move is not None:
                    twin.grad = None
        if move is not None:
            move.send([(m.p, twin) for twin, m in zip(self.twins, self.members, strict=True)])


class Rooms:
    """The streams of each device, and two buffers in which the chunks of an optimizer take turns, as large as any
    needs."""

    def __init__(self, make: Callable[[torch.device], Mover]) -> None:
        self._make = make
        self._movers: dict[torch.device, Mover] = {}
        self._expected: dict[torch.device, int] = {}
        self._made: dict[torch.device, list[Tensor]] = {}

    def mover(self, device: torch.device) -> Mover:
        if device not in self._movers:
            self._movers[device] = self._make(device)
        return self._movers[device]

    def expect(self, device: torch.device, size: int) -> None:
        """Announce that some chunk will ask for so many bytes: the first buffer that is made is large enough for it."""
        self._expected[device] = max(size, self._expected.get(device, 0))

    def room(self, device: torch.device, size: int) -> Tensor:
        """Return one of the two buffers, in turns. A chunk keeps its own, even if the next one needs a larger one."""
        self.expect(device, size)
        made = self._made.setdefault(device, [])
        found = made.pop(0) if len(made) == 2 else None
        if found is None or found.numel() < size:
            found = self.mover(device).room(self._expected[device])
        made.append(found)
        return found

    def forget(self) -> None:
        """Let go of the buffers and what was expected of them; chunks keep theirs."""
        self._made.clear()
        self._expected.clear()


class Offload:
    """The steps of an optimizer that has groups with offload=True."""

    def __init__(
        self,
        make: Callable[[torch.device], Mover] = mover,
        resident: Sequence[str] = ("cpu",),
        rooms: Rooms | None = None,
        part: bool = False,
    ) -> None:
        """resident   types of devices whose parameters stay where they are
        part       True if it steps some parameters of an optimizer, and others beside it the rest, one at a time
        """
        self._resident = resident
        self._rooms = Rooms(make) if rooms is None else rooms
        self.active = False
        self._known: list[tuple[object, ...]] = []
        self._chunks: list[Chunk] = []
        self._part = part

    def part(self) -> Offload:
        """Return one for a part of the optimizer: it moves by the same streams and buffers."""
        return Offload(resident=self._resident, rooms=self._rooms, part=True)

    def expect(self, p: Tensor) -> None:
        """Announce that this parameter, with a gradient of its own dtype, will be moved if its group says so."""
        if p.device.type not in self._resident:
            self._rooms.expect(p.device, 2 * _lines(p.nbytes))

    def forget_tables(self) -> None:
        """Free the memory that kernels need between stages, of every chunk."""
        for chunk in self._chunks:
            chunk.stepper.forget_tables()

    def leaves(self, group: dict[str, Any], p: Tensor) -> bool:
        """Return True if the host updates this parameter."""
        return bool(group.get("offload")) and p.device.type not in self._resident

    def settle(self, groups: Sequence[dict[str, Any]]) -> list[tuple[Tensor, torch.device | None]]:
        """Put states that are made or read from now on where the groups want them.

        Returns (parameter, its home until now) for those for which that is another place.
        """
        changed: list[tuple[Tensor, torch.device | None]] = []
        for entry in entries.of(groups):
            p = entry.p
            wanted = torch.device("cpu") if self.leaves(entry.group, p) and not sharding.is_sharded(p) else p.device
            if state.home(p) != wanted:
                changed.append((p, None if state.home(p) == p.device else state.home(p)))
                state.settle(p, None if wanted == p.device else wanted)
        return changed

    def step(self, owner: Owner, stepper: Stepper, scaler: counting.Scaler | None = None) -> None:
        """Step every parameter that has a gradient: chunk by chunk if a group asks for it, else by the stepper."""
        if not self.active and not any(group.get("offload") for group in owner.groups):
            stepper.step(owner, scaler)
            return
        with torch.no_grad(), owner.uninterrupted:
            self._check(owner, scaler)
            if scaler is not None and scaler.found_infinity():
                return
            self._divide(owner, stepper)
            for chunk in self._chunks:
                chunk.open(owner)
            moving = [chunk for chunk in self._chunks if chunk.room is not None]
            leaving = [(chunk, self._rooms.mover(chunk.members[0].p.device)) for chunk in moving]
            tokens = [chunk.fetch(move) for chunk, move in leaving[:1]]
            for chunk in self._chunks:
                if chunk.room is None:
                    chunk.step(owner)
            for k, (chunk, move) in enumerate(leaving):
                tokens += [following.fetch(its) for following, its in leaving[k + 1 : k + 2]]
                chunk.step(owner, move, tokens[k])

    def _check(self, owner: Owner, scaler: counting.Scaler | None) -> None:
        """Refuse options that would be refused in the middle of a step."""
        for group in owner.groups:
            options.hypers_of(owner.cls, group)
            if group.get("offload") and group["backend"] == "triton":
                raise ValueError(
                    f"{owner.cls.__name__}: offload=True updates on the host, where backend='triton' does not "
                    f"run; take backend='auto'"
                )
        if scaler is not None and scaler.scale is not None:  # a GradScaler hands it to fused=True alone
            raise RuntimeError(
                f"{owner.cls.__name__}: offload=True takes no scaled gradients; call scaler.unscale_(optimizer) "
                f"before scaler.step(optimizer)"
            )

    def _members(self, owner: Owner, stepper: Stepper) -> list[Entry]:
        """Return the parameters of the step: those with a gradient, and parts of tensors that may have one elsewhere.

        Raises an error for those that are refused.
        """
        members: list[Entry] = []
        for entry in entries.of(owner.groups):
            p, g = entry.p, entry.p.grad
            leaves, sharded = self.leaves(entry.group, p), sharding.is_sharded(p)
            if g is None:
                if p.requires_grad and sharded and not leaves:  # ranks agree on it in the step
                    members.append(entry)
                continue
            members.append(entry)
            admit.check_pair(owner.cls, stepper.dtypes, p, g, entry.name)
            if leaves and sharded:
                raise NotImplementedError(
                    f"{owner.cls.__name__}: offload=True does not move parts of tensors: "
                    f"{state.label(p, entry.name)} is a DTensor on {p.device}.  Let fully_shard keep it on the host "
                    f"(offload_policy=CPUOffloadPolicy()), or leave offload=True out"
                )
            if leaves:
                admit.in_memory(owner.cls, p, g, entry.name, False)
        return members

    def _divide(self, owner: Owner, stepper: Stepper) -> None:
        """Divide the parameters of the step into chunks; those of the step before stay if nothing is new."""
        members = self._members(owner, stepper)
        known: list[tuple[object, ...]] = []
        for p, group, number, _, _, name in members:
            grad_dtype = None if p.grad is None else p.grad.dtype
            known.append((id(p), number, name, p.dtype, grad_dtype, p.device, p.shape, self.leaves(group, p)))
        if known == self._known:
            return
        self._known = []
        staying = [m for m in members if not self.leaves(m.group, m.p)]
        leaving = [m for m in members if self.leaves(m.group, m.p)]
        sums = any(needs_model(owner, m) for m in members)
        if sums and staying and leaving:
            raise ValueError(
                f"{owner.cls.__name__} sums over the whole model: offload=True must hold for all parameters, or for "
                f"none"
            )
        if not self._part:
            self._rooms.forget()
        chunks: list[list[Entry]] = []
        size = 0
        for m in leaving:  # so that no chunk is larger than CHUNK bytes if it can be
            if not chunks or chunks[-1][0].p.device != m.p.device or (size + _bytes(m) > CHUNK and not sums):
                chunks.append([])
                size = 0
            chunks[-1].append(m)
            size += _bytes(m)
        for chunk in chunks:
            self._rooms.expect(chunk[0].p.device, sum(map(_bytes, chunk)))
        self._chunks = [Chunk(owner, staying, None, sums)] if staying else []
        for chunk in chunks:
            room = self._rooms.room(chunk[0].p.device, sum(map(_bytes, chunk)))
            self._chunks.append(Chunk(owner, chunk, room, sums))
        self.active = bool(leaving)
        self._known = known


def sums_over_model(variant: Variant) -> bool:
    """Return True if a step needs sums over the model."""
    return bool(variant.model_temps) or any(f.space == "model" for f in variant.fields)


def needs_model(owner: Owner, member: Entry) -> bool:
    """Return True if a parameter's update needs sums over the model, at any step."""
    _, plan, variant = checkpoint.select(owner.cls, member.group, member.p, member.name)
    return any(sums_over_model(v) for v in plan.variants if v.param == variant.param)


def _bytes(m: Entry) -> int:
    """Return the bytes of the cache lines of a weight and its gradient."""
    return max(LINE, sum(_lines(t.nbytes) for t in (m.p, m.p.grad) if t is not None))


def _lines(size: int) -> int:
    """Return the bytes of the whole cache lines that so many bytes fill."""
    return -(-size // LINE) * LINE
