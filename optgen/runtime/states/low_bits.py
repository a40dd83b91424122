"""The bits that a weight lost when it was cast to 16 bits, kept beside it until an optimizer takes them.

They are an attribute of the Parameter, a dict of plain tensors and an int: pickled with it, freed with it, and neither
a buffer nor an entry of a state dict. Each element has an int16, the distance of its fp32 pattern from that of the
rounded weight; distances that do not fit (ties, fp16 subnormals) are listed separately. A checksum of the weight tells
whether another one was written since; the low bits then count for nothing.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.layout import sharding

ATTRIBUTE = "_optgen_low_bits"
CARRIER = "_optgen_low_bits_of"

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Dtypes of weights that leave bits behind."""

ODD = 6364136223846793005  # the multiplier of Knuth's MMIX generator; products wrap around

CHUNK = 2**24
"""The number of elements worked on at a time, which bounds temporaries to 128 MiB each."""

_carrying: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models with a Carrier: parameters do not say which model they belong to."""

_holders: dict[int, weakref.ref[Tensor]] = {}
"""References to parameters with bits: torch refuses to swap a tensor that has one, which would take its bits away."""


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
    key = id(p)
    _holders[key] = weakref.ref(p, lambda _: _holders.pop(key, None))


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
    _holders.pop(id(p), None)


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


class Carrier:
    """The low bits of a module's parameters, copied with it when it is deep-copied or sent to another process.

    torch then copies parameters without their attributes.

    ids      of the parameters that had bits when the module was cast
    warned   True if a warning has said that some were left behind
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.ids = frozenset(id(p) for p in module.parameters() if ATTRIBUTE in p.__dict__)
        self.warned = False

    def _kept(self) -> tuple[nn.Module | None, list[Tensor], list[dict[str, Any]]]:
        """Return the module, its parameters that have bits, and these."""
        module = self._module()
        params = [] if module is None else [p for p in module.parameters() if ATTRIBUTE in p.__dict__]
        return module, list(params), [p.__dict__[ATTRIBUTE] for p in params]

    def __deepcopy__(self, memo: dict[int, Any]) -> Carrier | None:
        module, params, bits = self._kept()
        return _carrier(copy.deepcopy(params, memo), copy.deepcopy(bits, memo), memo.get(id(module)))

    def __reduce__(self) -> tuple[object, ...]:
        module, params, bits = self._kept()
        return _carrier, (params, bits, module)


def _carrier(params: list[Tensor], kept: list[dict[str, Any]], module: nn.Module | None = None) -> Carrier | None:
    """Give copies of parameters their bits; return the Carrier of the module's copy, if there is a module."""
    for p, own in zip(params, kept, strict=True):
        attach(p, own)
    if not isinstance(module, nn.Module):
        return None
    made = Carrier.__new__(Carrier)
    made._module, made.ids, made.warned = weakref.ref(module), frozenset(map(id, params)), False
    return made


class CopiedLowBits:
    """The low bits of an optimizer's parameters, while it is copied."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = [p for p in params if ATTRIBUTE in p.__dict__]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        _carrier(copy.deepcopy(self._params, memo), copy.deepcopy([p.__dict__[ATTRIBUTE] for p in self._params], memo))

    def __reduce__(self) -> tuple[object, ...]:
        return _carrier, (self._params, [p.__dict__[ATTRIBUTE] for p in self._params])


def carry(module: nn.Module) -> None:
    """Let copies of the module, and of each of its parts, keep the bits of its parameters."""
    for part in module.modules():
        part.__dict__.pop(CARRIER, None)
        carrier = Carrier(part)
        if carrier.ids:
            part.__dict__[CARRIER] = carrier
    if CARRIER in module.__dict__:
        _carrying.add(module)


def sharded_models(params: Iterable[Tensor]) -> list[nn.Module]:
    """Return the models that have bits kept and that these parameters belong to, if these are sharded."""
    own = {id(p) for p in params if _is_part(p)}
    return [m for m in list(_carrying) if any(id(p) in own for p in m.parameters())] if own else []


def _is_part(p: Tensor) -> bool:
    return sharding.is_sharded(p) or bool(getattr(p, "_fsdp_flattened", False))


def lost(module: nn.Module) -> int:
    """Return how many parameters with bits were replaced when the module was sharded; 0 if that was said already.

    Parameters of a module that is not sharded may have been replaced by other weights (a new head, an assigned state
    dict), to which the bits never belonged.
    """
    params = list(module.parameters())
    if not any(_is_part(p) for p in params):
        return 0
    own, found = {id(p) for p in params}, set[int]()
    for part in module.modules():
        carrier = part.__dict__.get(CARRIER)
        if isinstance(carrier, Carrier) and not carrier.warned and (orphans := carrier.ids - own):
            carrier.warned = True
            found |= orphans
    return len(found)
