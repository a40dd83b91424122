"""The way of tensors between a device and the host: pinned memory, and copies beside the work of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding
from optgen.runtime.layout.fp8_weight import kept_with
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Owner
from optgen.runtime.states import low_bits, state

HOST = torch.device("cpu")

COUNTS = (torch.int64, torch.float64)
"""Dtypes of the numbers that `capturable` optimizers count with, and of no field of a state."""

LINE = 64
"""Bytes of a cache line."""

Pair = tuple[Tensor, Tensor]
"""(written, read)."""


def lines(t: Tensor) -> int:
    """Return the bytes of the cache lines that a tensor takes."""
    return -(-t.nbytes // LINE) * LINE


def views(buffer: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a buffer (uint8) of the dtypes and shapes of these tensors, each from a cache line on."""
    starts = accumulate(map(lines, likes), initial=0)
    return [buffer[x : x + t.nbytes].view(t.dtype).view(t.shape) for t, x in zip(likes, starts, strict=False)]


class Place(NamedTuple):
    """A tensor in a dict that is to lie on a device."""

    entry: dict[str, Any]
    key: str
    home: torch.device

    @property
    def tensor(self) -> Tensor:
        """The part on this rank: of an input that is freed, the one number that stands for all."""
        x: Tensor = sharding.local(self.entry[self.key])
        return x.as_strided((1,), (1,)) if x.numel() > 1 and not any(x.stride()) else x

    def put(self, twin: Tensor) -> None:
        """Let a copy stand in the place of the tensor."""
        old: Any = self.entry[self.key]
        twin = twin if twin.shape == (shape := sharding.local(old).shape) else twin.expand(shape)
        self.entry[self.key] = sharding.wrapped(twin, sharding.layout_of(old)) if sharding.is_sharded(old) else twin


def places(owner: Owner, away: bool, sums: Mapping[int, dict[str, Any]]) -> Iterator[Place]:
    """Yield all that is kept of parameters: fields of their states where these are at home; bits that a cast left, and
    sums by id(parameter), on the host while states are away, else beside the parameter."""
    for e in entries.of(owner.groups):
        kept, own = owner.states.get(e.p, {}), checkpoint.keys_of(owner.cls, e)
        own -= kept_with(e.p, {}).keys()
        fields = {key: x for key, x in kept.items() if key in own and getattr(x, "dtype", None) not in COUNTS}
        beside = HOST if away else e.p.device
        waiting, total = e.p.__dict__.get(low_bits.ATTRIBUTE, {}), sums.get(id(e.p), {})
        for entry, keys, home in ((kept, fields, state.home(e.p)), (waiting, waiting, beside), (total, total, beside)):
            yield from (Place(entry, x, home) for x in keys if isinstance(t := entry[x], Tensor) and not t.is_meta)


class Mover:
    """The way between the host and a device: two buffers in which chunks take turns, and streams beside the one that
    computes. Copies of devices other than CUDA's are done when they return.

    largest   the bytes that the largest known chunk needs: buffers are made so large
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.largest, self.buffers = device, 0, list[Tensor]()
        stream: Any = torch.cuda.Stream if device.type == "cuda" else lambda _: None
        self.down, self.up = stream(device), stream(device)

    def buffer(self) -> Tensor:
        """Return the buffer whose turn it is. A chunk keeps its own, even if a later one needs a larger one."""
        found = self.buffers.pop(0) if len(self.buffers) == 2 else None
        if found is None or found.numel() < self.largest:
            pinned = self.device.type == "cuda"
            found = torch.empty(self.largest, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.buffers.append(found)
        return found

    def _copy(self, stream: Any, pairs: Sequence[Pair]) -> Any:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for written, read in pairs:
                written.copy_(read, non_blocking=stream is not None)
                for tensor in (written, read):
                    if tensor.is_cuda:  # its memory is not to be used again before the copy is done
                        tensor.record_stream(stream)
        if stream is self.up and stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        return None if stream is None else stream.record_event()

    def fetch(self, pairs: Sequence[Pair]) -> Any:
        """Start copies to the host after all work that the device was given so far; return their event, if any."""
        return self._copy(self.down, pairs)

    def move(self, places: Sequence[Place], pin: bool) -> Any:
        """Start copies of tensors to their places, which are all on the host or on the device; return the event that
        the host waits for."""
        old, home = [x.tensor for x in places], places[0].home
        pinned = pin and home == HOST and self.device.type == "cuda"
        pairs = [(torch.empty_like(x, device=home, pin_memory=pinned), x) for x in old]
        event = self._copy(self.down if home == HOST else self.up, pairs)
        for place, (twin, _) in zip(places, pairs, strict=True):
            place.put(twin)
        return event if home == HOST else None

    def send(self, pairs: Sequence[Pair]) -> None:
        """Start copies to the device after that work, for which all work waits that it is given from now on."""
        self._copy(self.up, pairs)
