"""States in host memory: the host updates the weights of an accelerator, chunk by chunk.

For each chunk of parameters, weights and gradients are copied to pinned memory, the C++ backend makes the step there,
and the weights are copied back.  Copies of one chunk and the work on another go on at the same time: two buffers take
turns, copies have streams of their own, a thread waits for them and calls the kernels.  `step()` returns when the host
has done its part; the last copies back are waited for by the device, in its own order of work.

A step on the host has the bits of the C++ backend.  Parameters on the CPU are updated where they are.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding
from optgen.runtime.modes import alone
from optgen.runtime.records.arena import LINE
from optgen.runtime.states import low_bits, state
from optgen.runtime.work import counting

if TYPE_CHECKING:
    from optgen.runtime.optimizer import Optimizer

CHUNK = 64 * 1024 * 1024
"""Bytes of weights and gradients that are on their way together; a larger parameter is a chunk of its own."""

Pair = tuple[Tensor, Tensor]
"""(written, read)."""


class Mover(Protocol):
    """Copies between a device and the host."""

    def room(self, size: int) -> Tensor:
        """Host memory of that many bytes."""

    def fetch(self, pairs: Sequence[Pair]) -> Any:
        """Starts copies to the host, after all work that the device was given so far; what `wait` takes."""

    def wait(self, token: Any) -> None:
        """Until those copies are done."""

    def send(self, pairs: Sequence[Pair]) -> Any:
        """Starts copies to the device; what `join` and `wait` take."""

    def join(self, tokens: Sequence[Any]) -> None:
        """What the device is given from now on comes after those copies."""


class Plain:
    """Copies that are done when they return: any device."""

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def fetch(self, pairs: Sequence[Pair]) -> None:
        for written, read in pairs:
            written.copy_(read)

    def wait(self, token: None) -> None:
        pass

    def send(self, pairs: Sequence[Pair]) -> None:
        self.fetch(pairs)

    def join(self, tokens: Sequence[None]) -> None:
        pass


class Cuda:
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

    def send(self, pairs: Sequence[Pair]) -> torch.cuda.Event:
        return self._copy(self.up, pairs)

    def join(self, tokens: Sequence[torch.cuda.Event]) -> None:
        for token in tokens:
            torch.cuda.current_stream(self.device).wait_event(token)


def mover(device: torch.device) -> Mover:
    return Cuda(device) if device.type == "cuda" else Plain()


class Member:
    """A parameter in a step: the number of its group, its name or position."""

    __slots__ = ("name", "number", "p")

    def __init__(self, p: Tensor, number: int, name: str | int) -> None:
        self.p, self.number, self.name = p, number, name


class Chunk:
    """Parameters that are stepped together, by an optimizer of their own.

    twins  what that optimizer sees: in host memory, or where they stay the parameters themselves
    sums   whether the rule sums over the model: then it also sees the states of parameters without a gradient
    """

    def __init__(
        self, optimizer: Optimizer, members: Sequence[Member], twins: Sequence[Tensor] | None, sums: bool = False
    ) -> None:
        self.members, self.sums = members, sums
        self.hosted = twins is not None
        self.twins = [m.p for m in members] if twins is None else list(twins)
        self.numbers = list(dict.fromkeys(m.number for m in members))
        self.groups: list[dict[str, Any]] = []
        for number in self.numbers:
            inside = [(t, m.name) for t, m in zip(self.twins, members, strict=True) if m.number == number]
            self.groups.append({"params": [t for t, _ in inside], "param_names": [name for _, name in inside]})
        self.stepper = alone.part(optimizer, self.groups)
        groups, cls = optimizer.param_groups, type(optimizer)
        found = {id(plan): plan for m in members for plan in [checkpoint.select(cls, groups[m.number], m.p, m.name)[1]]}
        self.stepped = False  # of one that stays, in the step that is under way
        self.stored = frozenset(f.name for plan in found.values() for v in plan.variants for f in v.fields)

    def open(self, optimizer: Optimizer) -> None:
        """Options and states as they are now."""
        self.stepper._broke_off = None if self.hosted else optimizer._broke_off
        self.stepped = False
        for number, group in zip(self.numbers, self.groups, strict=True):
            alone.take_over(optimizer.param_groups[number], group)
            group["offload"] = False
        kept: dict[Any, Any] = {}
        for m, twin in zip(self.members, self.twins, strict=True):
            state.settle(m.p, torch.device("cpu") if self.hosted else None)
            if self.hosted and low_bits.ATTRIBUTE in m.p.__dict__:  # its state, made from the twin, takes them
                setattr(twin, low_bits.ATTRIBUTE, m.p.__dict__[low_bits.ATTRIBUTE])
            entry = optimizer.state.get(m.p)
            if entry:
                here = state.home(m.p)
                for name, value in entry.items():
                    if isinstance(value, Tensor) and name in self.stored and value.device != here:
                        entry[name] = value.to(here)
                kept[twin] = entry
        if self.sums:
            inside = {m.p for m in self.members}
            kept.update((p, entry) for p, entry in optimizer.state.items() if p not in inside)
        mine = self.stepper.state
        if len(kept) != len(mine) or any(mine.get(twin) is not entry for twin, entry in kept.items()):
            self.stepper.state = defaultdict(dict, kept)

    def close(self, optimizer: Optimizer) -> None:
        """States that were made belong to the user's optimizer."""
        for m, twin in zip(self.members, self.twins, strict=True):
            made = self.stepper.state.get(twin)
            if made is not None and optimizer.state.get(m.p) is not made:
                optimizer.state[m.p] = made
                low_bits.drop(m.p)


class Room:
    """Host memory that several take turns in, and what the last one said of its copies back."""

    __slots__ = ("memory", "sent", "token")

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.sent = memory, False
        self.token: Any = None

    def enter(self, move: Mover) -> None:
        """Until the one before has left."""
        if self.sent:
            move.wait(self.token)
            self.sent = False

    def leave(self, token: Any) -> None:
        self.token, self.sent = token, True


class Crew:
    """Streams by device, and the thread that works on the host; made when first needed.

    Also two rooms by device for parts of one optimizer that are never at work at once, as large as any of them needs.
    """

    def __init__(self, make: Callable[[torch.device], Mover]) -> None:
        self._make = make
        self._movers: dict[torch.device, Mover] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # backward runs a thread per device
        self._expected: dict[torch.device, int] = {}
        self._rooms: dict[torch.device, list[Room]] = {}
        self._turns: dict[torch.device, int] = {}

    def mover(self, device: torch.device) -> Mover:
        with self._lock:
            if device not in self._movers:
                self._movers[device] = self._make(device)
            return self._movers[device]

    def expect(self, device: torch.device, size: int) -> None:
        """Some part will ask for so many bytes: the first room that is made is large enough for it."""
        with self._lock:
            self._expected[device] = max(size, self._expected.get(device, 0))

    def room(self, device: torch.device, size: int) -> Room:
        """One of the two rooms for parts, in turns; a part that keeps its room finds its tensors at the same place."""
        move = self.mover(device)
        with self._lock:
            most = self._expected[device] = max(size, self._expected.get(device, 0))
            turn = self._turns[device] = 1 - self._turns.get(device, 1)
            rooms = self._rooms.setdefault(device, [])
            if turn == len(rooms):
                rooms.append(Room(move.room(most)))
            elif rooms[turn].memory.numel() < size:  # who is in the old one stays there
                rooms[turn] = Room(move.room(most))
            return rooms[turn]

    def worker(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "optgen-offload")
            return self._worker


class Offload:
    """The steps of an optimizer that has groups with offload=True."""

    def __init__(
        self,
        make: Callable[[torch.device], Mover] = mover,
        resident: Sequence[str] = ("cpu",),
        crew: Crew | None = None,
        part: bool = False,
    ) -> None:
        """resident   types of devices whose parameters stay where they are
        part       whether this one steps some parameters of an optimizer, others beside it the rest, one at a time
        """
        self._resident = resident
        self._crew = Crew(make) if crew is None else crew
        self.active = False
        self._known: list[tuple[object, ...]] = []
        self._chunks: list[Chunk] = []
        self._grads: list[list[Tensor]] = []
        self._rooms: list[Tensor] = []
        self.part = part
        self._room: Room | None = None

    def alike(self) -> Offload:
        """One for a part of the same optimizer: it moves by the same streams and thread, through rooms of all parts."""
        return Offload(resident=self._resident, crew=self._crew, part=True)

    def expect(self, p: Tensor) -> None:
        """This parameter, with a gradient of its own dtype, will be moved if its group says so."""
        if p.device.type not in self._resident:
            self._crew.expect(p.device, 2 * _lines(p.numel() * p.element_size()))

    def forget_tables(self) -> None:
        """The room that kernels need between stages, of every chunk."""
        for chunk in self._chunks:
            chunk.stepper._forget_tables()

    def leaves(self, group: dict[str, Any], p: Tensor) -> bool:
        """Whether the host updates this parameter."""
        return bool(group.get("offload")) and p.device.type not in self._resident

    def settle(self, optimizer: Optimizer) -> list[tuple[Tensor, torch.device | None]]:
        """States that are made or read from now on are where the groups want them; (parameter, its home until now) of
        those for which that is another place."""
        changed: list[tuple[Tensor, torch.device | None]] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                wanted = torch.device("cpu") if self.leaves(group, p) and not sharding.is_sharded(p) else p.device
                if state.home(p) != wanted:
                    changed.append((p, None if state.home(p) == p.device else state.home(p)))
                    state.settle(p, None if wanted == p.device else wanted)
        return changed

    def step(self, optimizer: Optimizer, scaler: counting.Scaler | None = None) -> None:
        """One update of every parameter that has a gradient, unless the scaler has found an infinity."""
        with torch.no_grad():
            self._check(optimizer)
            if scaler is not None and scaler.found_infinity():
                return
            self._divide(optimizer)
            for chunk in self._chunks:
                chunk.open(optimizer)
            back: list[tuple[Chunk, Future[Any]]] = []
            threads = torch.get_num_threads()
            try:
                for chunk, grads in zip(self._chunks, self._grads, strict=True):
                    if not chunk.hosted:
                        chunk.stepper._update()
                        chunk.close(optimizer)
                        chunk.stepped = True
                        continue
                    if len(back) >= 2:  # the buffer was that of the last chunk but one
                        self._mover(back[-2][0]).wait(back[-2][1].result())
                    move = self._mover(chunk)
                    pairs = [(twin, m.p) for twin, m in zip(chunk.twins, chunk.members, strict=True)]
                    pairs += [(g, m.p.grad) for g, m in zip(grads, chunk.members, strict=True) if m.p.grad is not None]
                    if self._room is not None:
                        self._room.enter(move)
                    token = move.fetch(pairs)
                    back.append(
                        (chunk, self._crew.worker().submit(self._run, optimizer, chunk, grads, move, token, threads))
                    )
            except BaseException as error:
                self._break_off(optimizer, back, error)
                raise
            failed = self._settle(back)
            if failed is not None:
                self._break_off(optimizer, back, failed)
                raise failed
            optimizer._broke_off = None

    def _settle(self, back: Sequence[tuple[Chunk, Future[Any]]]) -> BaseException | None:
        """Waits for the host's part of chunks; the device waits for their copies.  The first error among them."""
        wait([future for _, future in back])
        for chunk, future in back:
            if future.exception() is None:
                self._mover(chunk).join([future.result()])
                if self._room is not None:
                    self._room.leave(future.result())
        return next((error for _, future in back if (error := future.exception()) is not None), None)

    def _break_off(self, optimizer: Optimizer, back: Sequence[tuple[Chunk, Future[Any]]], error: BaseException) -> None:
        """An error in one chunk: others may have been stepped, and of that one the kernels before it."""
        self._settle(back)
        ended = {id(chunk) for chunk, future in back if future.exception() is None}
        done: list[state.State] = []
        at_work: list[state.State] = []
        for chunk in self._chunks:
            inner = chunk.stepper._broke_off
            states = [optimizer.state[m.p] for m in chunk.members if m.p in optimizer.state]
            if id(chunk) in ended or chunk.stepped:
                done += states
            elif inner is not None and inner is not optimizer._broke_off:  # of this attempt, not of the one before
                done += inner.done
                at_work += inner.at_work
        optimizer._break_off(error, done, at_work)

    def _run(
        self, optimizer: Optimizer, chunk: Chunk, grads: Sequence[Tensor], move: Mover, token: Any, threads: int
    ) -> Any:
        """The host's part of a chunk, in the worker."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # each thread has its own count
        with torch.no_grad():
            move.wait(token)
            for twin, g in zip(chunk.twins, grads, strict=True):
                twin.grad = g
            pairs = [(m.p, twin) for twin, m in zip(chunk.twins, chunk.members, strict=True)]
            try:
                chunk.stepper._update()
            except BaseException:
                chunk.close(optimizer)
                if chunk.stepper._broke_off is not None:  # weights go with the states that were stepped
                    move.wait(move.send(pairs))
                raise
            finally:
                for twin in chunk.twins:
                    twin.grad = None
            chunk.close(optimizer)
            return move.send(pairs)

    def _check(self, optimizer: Optimizer) -> None:
        """Options that would be refused in the middle of a step are refused before it."""
        for group in optimizer.param_groups:
            for hyper in optimizer.HYPERS:
                hyper.read(group[hyper.name])
            if group.get("offload") and group["backend"] == "triton":
                raise ValueError(
                    f"{type(optimizer).__name__}: offload=True updates on the host, where backend='triton' does not "
                    f"run; take backend='auto'"
                )
        if getattr(optimizer, "grad_scale", None) is not None:  # a GradScaler hands it to fused=True alone
            raise RuntimeError(
                f"{type(optimizer).__name__}: offload=True takes no scaled gradients; call scaler.unscale_(optimizer) "
                f"before scaler.step(optimizer)"
            )

    def _mover(self, chunk: Chunk) -> Mover:
        return self._crew.mover(chunk.members[0].p.device)

    def _divide(self, optimizer: Optimizer) -> None:
        """Chunks of the parameters that have gradients and have not made the step that broke off; those in parts also
        where that may hold on other ranks alone.  The chunks of the step before, where nothing is new."""
        members: list[Member] = []
        known: list[tuple[object, ...]] = []
        position, broke_off = 0, optimizer._broke_off
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                g = p.grad
                name = position + i if names is None else names[i]
                if g is None or (broke_off is not None and broke_off.made(p, g)):
                    if p.requires_grad and sharding.is_sharded(p) and not self.leaves(group, p):
                        # Other ranks may have a gradient, or its step yet to make: they agree on it in the step.
                        members.append(Member(p, number, name))
                        known.append((id(p), number, name, p.dtype, None, p.device, p.shape, False))
                else:
                    members.append(Member(p, number, name))
                    optimizer._check_pair(p, g, name)
                    leaves = self.leaves(group, p)
                    if leaves and sharding.is_sharded(p):
                        raise NotImplementedError(
                            f"{type(optimizer).__name__}: offload=True does not move parts of tensors: "
                            f"{state.label(p, name)} is a DTensor on {p.device}.  Let fully_shard keep it on the host "
                            f"(offload_policy=CPUOffloadPolicy()), or leave offload=True out"
                        )
                    if leaves:
                        optimizer._in_memory(p, g, name, False)
                    known.append((id(p), number, name, p.dtype, g.dtype, p.device, p.shape, leaves))
            position += len(group["params"])
        if known == self._known:
            return
        self._known = []
        staying = [m for m in members if not self.leaves(optimizer.param_groups[m.number], m.p)]
        leaving = [m for m in members if self.leaves(optimizer.param_groups[m.number], m.p)]
        sums = any(needs_model(optimizer, m) for m in members)
        if sums and staying and leaving:
            raise ValueError(
                f"{type(optimizer).__name__} sums over the whole model: offload=True must hold for all parameters, "
                f"or for none"
            )
        divided = _divided(leaving, float("inf") if sums else CHUNK)
        rooms: list[Tensor] = []
        self._room = None
        if self.part and len(divided) == 1:
            self._room = self._crew.room(leaving[0].p.device, _place(leaving)[1])
            rooms.append(self._room.memory)
        else:
            for k in range(min(2, len(divided))):
                size = max(_place(chunk)[1] for chunk in divided[k::2])
                rooms.append(self._crew.mover(leaving[0].p.device).room(size))
        self._rooms, self._chunks, self._grads = rooms, [], []
        if staying:
            self._chunks.append(Chunk(optimizer, staying, None, sums))
            self._grads.append([])
        for k, chunk in enumerate(divided):
            twins, grads = _views(chunk, rooms[k % 2])
            self._chunks.append(Chunk(optimizer, chunk, twins, sums))
            self._grads.append(grads)
        self.active = bool(leaving)
        self._known = known


def needs_model(optimizer: Optimizer, member: Member) -> bool:
    """Whether a parameter's update needs sums over the model, at any step."""
    group = optimizer.param_groups[member.number]
    _, plan, variant = checkpoint.select(type(optimizer), group, member.p, member.name)
    found = [v for v in plan.variants if v.param == variant.param]
    return any(v.model_temps or any(f.space == "model" for f in v.fields) for v in found)


def _divided(members: Sequence[Member], most: float) -> list[list[Member]]:
    """In order, by device, so that none is larger than `most` where it can be."""
    chunks: list[list[Member]] = []
    size = 0
    for m in members:
        own = _place([m])[1]
        if not chunks or size + own > most or chunks[-1][0].p.device != m.p.device:
            chunks.append([])
            size = 0
        chunks[-1].append(m)
        size += own
    return chunks


def _place(members: Sequence[Member]) -> tuple[list[tuple[int, int]], int]:
    """Offsets of each weight and gradient in a buffer, at starts of cache lines; bytes in all."""
    places, end = [], 0
    for m in members:
        assert m.p.grad is not None
        weight = end
        end += _lines(m.p.numel() * m.p.element_size())
        places.append((weight, end))
        end += _lines(m.p.numel() * m.p.grad.element_size())
    return places, max(end, LINE)


def _lines(size: int) -> int:
    """Bytes of the whole cache lines that so many bytes fill."""
    return -(-size // LINE) * LINE


def _views(members: Sequence[Member], room: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors shaped like the weights and gradients, in a buffer."""
    twins: list[Tensor] = []
    grads: list[Tensor] = []
    for m, (weight, grad) in zip(members, _place(members)[0], strict=True):
        assert m.p.grad is not None
        for start, like, out in ((weight, m.p, twins), (grad, m.p.grad, grads)):
            size = like.numel() * like.element_size()
            out.append(room[start : start + size].view(like.dtype).view(like.shape))
    return twins, grads
