"""The bits that a weight lost when it was cast to 16 bits, kept beside it until an optimizer takes them.

They are an attribute of the Parameter, a dict of plain tensors and an int: pickled with it, freed with it, and neither
a buffer nor an entry of a state dict. torch omits them where it deep-copies a Parameter. Each element has an int16, the
distance of its fp32 pattern from that of the rounded weight; distances that do not fit (ties, fp16 subnormals) are
listed separately. A checksum of the weight tells whether another one was written since; the low bits then count for
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.layout import sharding

ATTRIBUTE = "_optgen_low_bits"

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Dtypes of weights that leave bits behind."""

ODD = 6364136223846793005  # the multiplier of Knuth's MMIX generator; products wrap around

CHUNK = 2**24
"""The number of elements worked on at a time, which bounds temporaries to 128 MiB each."""

_cast: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters with bits of each model that was cast: parameters do not say which model they belong to."""


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
        attach(p, kept)


def attach(p: Tensor, kept: dict[str, Any]) -> None:
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


def register(model: nn.Module) -> None:
    """Note which parameters of a model have bits, so that sharding, which replaces them, is noticed."""
    _cast.pop(model, None)
    if ids := frozenset(id(p) for p in model.parameters() if ATTRIBUTE in p.__dict__):
        _cast[model] = ids


def sharded_models(params: Iterable[Tensor]) -> list[nn.Module]:
    """Return the models that were registered and that these parameters belong to, if these are sharded."""
    own = {id(p) for p in params if _is_part(p)}
    return [m for m in list(_cast) if any(id(p) in own for p in m.parameters())] if own else []


def _is_part(p: Tensor) -> bool:
    return sharding.is_sharded(p) or bool(getattr(p, "_fsdp_flattened", False))


def lost(model: nn.Module) -> int:
    """Return how many parameters with bits were replaced when the model was sharded; 0 if that was said already.

    Parameters of a model that is not sharded may have been replaced by other weights (a new head, an assigned state
    dict), to which the bits never belonged.
    """
    params = list(model.parameters())
    if not any(_is_part(p) for p in params):
        return 0
    found = set[int]().union(*(_cast.pop(part, ()) for part in list(model.modules())))
    return len(found.difference(map(id, params)))
