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
    """The plan and the backend of a group's parameters of one dtype and device, and their variants by size.

    own      the plan that they have for themselves; None: that of the group
    counted  True if their steps are counted on the device, as capturable=True asks, and fused=True if there is a
             GradScaler; None: as in their states.  Only Triton kernels can be told
    """

    __slots__ = (
        "_by_shape", "_cls", "_group", "backend", "counted", "device", "dtype", "large", "limit", "own", "plan",
        "small", "vector",
    )  # fmt: skip

    def __init__(self, cls: Any, group: dict[str, Any], p: Tensor, scaled: bool, own: str | None) -> None:
        self.dtype, self.device, self.own = p.dtype, p.device, own
        chosen = plans.resolved(cls, group.get("plan"), p.dtype, own)
        self.plan = chosen.pair
        self.backend = backends.choose(group["backend"], p.device, self.plan)
        self.counted: bool | None = False
        if self.backend == "triton" and all(flag.every is None for flag in cls.FLAGS):
            self.counted = True if group.get("capturable") else None if group.get("fused") else False
            if self.counted is None and scaled:
                self.counted = True
        self.limit = chosen.limit
        self._by_shape: dict[torch.Size, Variant] | None = None
        self._cls, self._group = cls, group
        if any(flag.shape is not None for flag in cls.FLAGS):
            self._by_shape = {}
            return
        flags = options.flags_of(cls, group)
        self.large = plans.variant(self.plan, p.dtype, False, flags)
        self.small = plans.variant(self.plan, p.dtype, True, flags)
        self.vector = plans.variant(self.plan, p.dtype, False, flags, True)

    def variant(self, p: Tensor) -> Variant:
        """Return the variant of a parameter."""
        if self._by_shape is not None:
            return self._by_shape.get(p.shape) or self._find(p)
        if self.limit and p.numel() < self.limit:
            return self.small
        return self.large if p.ndim >= 2 else self.vector

    def _find(self, p: Tensor) -> Variant:
        """Return the variant for the parameter's shape, which flags follow."""
        assert self._by_shape is not None
        flags = options.flags_of(self._cls, self._group, tuple(p.shape))
        found = plans.variant(self.plan, p.dtype, p.numel() < self.limit, flags, p.ndim < 2)
        self._by_shape[p.shape] = found
        return found


class GroupChoices:
    """The choices of one group."""

    def __init__(self, cls: Any, group: dict[str, Any], scaled: bool) -> None:
        self._cls, self._group, self._scaled = cls, group, scaled
        self._own, self._blocks = plans.own(group), blocks.of(cls, group)
        self._made: dict[tuple[torch.dtype, torch.device, str | None], Choice] = {}
        self._last: Choice | None = None

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
        variant = last.variant(p)
        if self._blocks:
            try:
                variant = blocks.seen(variant, p, self._blocks.get(name))
            except ValueError as error:
                raise ValueError(f"{self._cls.__name__}: blocks: parameter {name!r} {error}") from None
        return last, variant
