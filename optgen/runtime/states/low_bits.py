"""The bits that a weight lost when it was cast to 16 bits, kept beside it until an optimizer takes them.

They are an attribute of the Parameter, a dict of plain tensors and an int: pickled with it, freed with it, and neither
a buffer nor an entry of a state dict. Each element has an int16, the distance of its fp32 pattern from that of the
rounded weight; distances that do not fit (ties, fp16 subnormals) are listed separately. A checksum of the weight tells
whether another one was written since; the low bits then count for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.layout import sharding

ATTRIBUTE = "_optgen_low_bits"
CARRIER = "_optgen_low_bits_of"
"""The same of all parameters of an optimizer or a module, in pickles of older versions."""

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Dtypes of weights that leave bits behind."""

ODD = 6364136223846793005  # the multiplier of Knuth's MMIX generator; products wrap around

CHUNK = 2**24
"""The number of elements worked on at a time, which bounds temporaries to 128 MiB each."""

_kept: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that were cast: parameters do not say which model they belong to."""


def keep(p: Tensor, exact: Tensor) -> None:
    """Keep the bits of `exact` (fp32, p's shape) that its rounding `p` lost, if p is a 16-bit weight."""
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
    """Return the full weight, fp32 and contiguous on p's device; None if nothing is kept of p's present value."""
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
    """Drop the bits of p."""
    p.__dict__.pop(ATTRIBUTE, None)


def checksum(p: Tensor) -> int:
    """Return a 63-bit checksum of values and their order."""
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


def _carrier(params: list[Tensor], kept: list[dict[str, Any]]) -> None:
    """Give parameters their bits, as pickles of older versions ask."""
    for p, own in zip(params, kept, strict=True):
        setattr(p, ATTRIBUTE, own)


def remember(model: nn.Module) -> None:
    """Note whether parameters of a model have bits, for `lost`."""
    if any(ATTRIBUTE in p.__dict__ for p in model.parameters()):
        _kept.add(model)
    else:
        _kept.discard(model)


def lost(params: Iterable[Tensor]) -> bool:
    """Return True, once for a model, if these parameters took the place of some that had bits as it was sharded."""
    own = {id(p) for p in params if sharding.is_sharded(p) or getattr(p, "_fsdp_flattened", False)}
    found = [model for model in list(_kept) if own and any(id(p) in own for p in model.parameters())]
    _kept.difference_update(found)
    return bool(found)
