"""The plan, the backend and the variant of the parameters of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optgen.runtime.layout import plans
from optgen.runtime.options import blocks, options
from optgen.runtime.options.entries import Entry
from optgen.runtime.records import Variant
from optgen.runtime.step import backends


class Choice:
    """The plan and the backend of a group's parameters of one dtype and device.

    own       the plan that they have for themselves; None: that of the group
    counted   True if their steps are counted on the device, as capturable=True asks, and fused=True if there is a
              GradScaler; None: as in their states.  Only Triton kernels can be told
    limit     elements below which a tensor takes the variant for small ones
    variants  by shape, and blocks that are asked for
    """

    __slots__ = ("backend", "counted", "device", "dtype", "limit", "own", "plan", "variants")

    def __init__(self, cls: Any, group: dict[str, Any], p: Tensor, scaled: bool, own: str | None) -> None:
        self.dtype, self.device, self.own = p.dtype, p.device, own
        _, self.plan, self.limit = plans.resolved(cls, group.get("plan"), p.dtype, own)
        self.backend = backends.choose(group["backend"], p.device, self.plan)
        self.counted: bool | None = False
        if self.backend == "triton" and all(flag.clock is None for flag in cls.FLAGS):
            fused = (scaled or None) if group.get("fused") else False
            self.counted = True if group.get("capturable") else fused
        self.variants: dict[tuple[torch.Size, blocks.Count | None], Variant] = {}


class GroupChoices:
    """The choices of one group."""

    def __init__(self, cls: Any, group: dict[str, Any], scaled: bool) -> None:
        self._cls, self._group, self._scaled = cls, group, scaled
        self._own, self._blocks = plans.own(group), blocks.of(cls, group)
        self._made: dict[tuple[torch.dtype, torch.device, str | None], Choice] = {}
        self._last: Choice | None = None

    def rows(self, name: plans.Label) -> tuple[int, ...]:
        """Return the rows of each matrix of a parameter that is several of unequal numbers of rows, else ()."""
        count = self._blocks.get(name) if self._blocks else None
        return count if isinstance(count, tuple) else ()

    def find(self, entry: Entry) -> tuple[Choice, Variant]:
        """Return the choice and the variant of a parameter.  Raises ValueError if its blocks do not divide its rows."""
        p, name, last = entry.p, entry.name, self._last
        dtype, device, own = p.dtype, p.device, self._own.get(name) if self._own else None
        if last is None or dtype is not last.dtype or device != last.device or own != last.own:
            kind = (dtype, device, own)
            last = self._made.get(kind)
            if last is None:
                last = self._made[kind] = Choice(self._cls, self._group, p, self._scaled, own)
            self._last = last
        seen = p.shape, self._blocks.get(name) if self._blocks else None
        variant = last.variants.get(seen)
        if variant is None:
            try:
                shape = blocks.shape(self._cls, p, seen[1])
            except ValueError as error:
                raise ValueError(f"{self._cls.__name__}: blocks: parameter {name!r} {error}") from None
            flags = options.flags_of(self._cls, self._group, shape, name)
            variant = plans.variant(last.plan, dtype, p.numel() < last.limit, flags, p.ndim < 2)
            last.variants[seen] = variant = blocks.seen(
                self._cls, variant, p, seen[1], self._group, name
            )
        return last, variant
