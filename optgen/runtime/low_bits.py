"""The bits that a weight lost when it was cast to 16 bits, kept beside it until an optimizer takes them.

They hang on the Parameter as a dict of plain tensors and an int: pickled with it, freed with it, and seen by nothing
else (no buffer, no entry of a state dict).  int16 per element: the distance of the fp32 pattern from that of the
rounded weight; what does not fit (ties, fp16 subnormals) is listed apart.  They belong to one weight: a checksum of
the weight tells whether somebody has written another one since; then there is nothing to take.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime import sharding

ATTRIBUTE = "_optgen_low_bits"
CARRIER = "_optgen_low_bits_of"

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Dtypes of weights that leave bits behind."""

ODD = 6364136223846793005  # the multiplier of Knuth's MMIX generator; products wrap around

CHUNK = 2**24
"""Elements worked on at a time: bounds the temporaries to 128 MiB each."""


def keep(p: Tensor, exact: Tensor) -> None:
    """Keep what `p`, a rounding of `exact` (fp32, p's shape), lost of it; nothing where p is no 16-bit weight."""
    drop(p)
    if p.dtype not in NARROW:
        return
    low = torch.empty(p.shape, dtype=torch.int16, device=p.device)
    places, values = [], []
    lost = False
    for start, rounded, wide, out in _pieces(p.detach(), exact, low):
        distance = wide.view(torch.int32).long() - rounded.to(torch.float32).view(torch.int32).long()
        apart = (distance < -(2**15)) | (distance >= 2**15)
        out.copy_(distance.masked_fill(apart, 0))
        found = apart.nonzero().flatten()
        places.append(found + start)
        values.append(wide[found])
        lost = lost or bool((distance != 0).any())
    if lost:  # else the weight is all there is
        kept = {"low": low, "at": torch.cat(places), "exact": torch.cat(values), "check": checksum(p)}
        setattr(p, ATTRIBUTE, kept)


def exact(p: Tensor) -> Tensor | None:
    """The full weight, fp32 and contiguous on p's device; None where nothing is kept, or p is another weight by now."""
    kept = getattr(p, ATTRIBUTE, None)
    if kept is None or p.dtype not in NARROW or kept["low"].shape != p.shape or kept["check"] != checksum(p):
        return None
    made = torch.empty(p.shape, dtype=torch.float32, device=p.device)
    low = kept["low"].to(p.device)
    for _, rounded, out, less in _pieces(p.detach(), made, low):
        out.view(torch.int32).copy_(rounded.to(torch.float32).view(torch.int32) + less.to(torch.int32))
    made.view(-1)[kept["at"].to(p.device)] = kept["exact"].to(p.device)
    return made


def drop(p: Tensor) -> None:
    """Forget what was kept for p."""
    p.__dict__.pop(ATTRIBUTE, None)


def checksum(p: Tensor) -> int:
    """64 bits that another value, or the same ones in another order, are most unlikely to share."""
    flat = p.detach().reshape(-1)
    words = flat.view(torch.int16)
    total = 0
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].long() + 2**15 + 1
        place = torch.arange(start, start + part.numel(), device=part.device) * ODD | 1
        total += int((part * place).sum())
    return total % 2**63


def _pieces(p: Tensor, wide: Tensor, low: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    flat = p.reshape(-1), wide.reshape(-1), low.view(-1)
    for start in range(0, p.numel(), CHUNK):
        a, b, c = (t[start : start + CHUNK] for t in flat)
        yield start, a, b, c


class Carrier:
    """Takes the low bits along where a model is deep-copied: torch copies parameters without their attributes.

    Holds the parameters weakly: it keeps none alive that the model has dropped.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._refs = [weakref.ref(p) for p in params]
        self.said = False

    def strays(self, own: Collection[int]) -> int:
        """How many of the parameters are none of these, by id."""
        return sum((p := ref()) is None or id(p) not in own for ref in self._refs)

    @property
    def params(self) -> list[Tensor]:
        """Those for which something is kept."""
        found = [ref() for ref in self._refs]
        return [p for p in found if p is not None and ATTRIBUTE in p.__dict__]

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier:
        params = self.params
        copies = [copy.deepcopy(p, memo) for p in params]
        for p, made in zip(params, copies, strict=True):
            setattr(made, ATTRIBUTE, copy.deepcopy(p.__dict__[ATTRIBUTE], memo))
        return Carrier(copies)

    def __reduce__(self) -> tuple[object, ...]:
        return Carrier, (self.params,)


def carry(module: nn.Module, params: Iterable[Tensor]) -> None:
    """Let deep copies of the module keep what is kept for its parameters."""
    held = [p for p in params if ATTRIBUTE in p.__dict__]
    module.__dict__.pop(CARRIER, None)
    if held:
        module.__dict__[CARRIER] = Carrier(held)


def lost(module: nn.Module) -> int:
    """How many parameters that had bits kept the module has no more, where others are sharded: what shards a model puts
    DTensors, or flat parts, in their places.  0 where that was said already.

    Elsewhere other weights may have come (a new head, an assigned state dict), to which those bits never belonged.
    """
    params = list(module.parameters())
    if not any(sharding.is_sharded(p) or getattr(p, "_fsdp_flattened", False) for p in params):
        return 0
    own, count = {id(p) for p in params}, 0
    for part in module.modules():
        carrier = part.__dict__.get(CARRIER)
        if isinstance(carrier, Carrier) and not carrier.said and (found := carrier.strays(own)):
            carrier.said = True
            count += found
    return count
