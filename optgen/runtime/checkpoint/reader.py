"""The reader of other packages' states, loaded by name when an optimizer is given a state dict that is not optgen's.

The runtime imports nothing of `optgen.convert`: steps and optgen's own checkpoints do without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

MODULE = "optgen.convert.packages"


class Reader(Protocol):
    """The functions of `MODULE`, documented there."""

    def dense(self, entry: Mapping[str, Any], states: Sequence[str], shape: tuple[int, ...]) -> dict[str, Any]:
        """Return an entry with its states as fp32 tensors."""

    def codes(self, entry: Mapping[str, Any], states: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (codes, scales) of each state that is kept in codes."""

    def weight(self, entry: Mapping[str, Any], p: Tensor, master_bytes: object) -> Tensor | None:
        """Return the full weight of p that an entry holds."""


def reader() -> Reader:
    """Return the reader of other packages' states."""
    return cast(Reader, importlib.import_module(MODULE))
