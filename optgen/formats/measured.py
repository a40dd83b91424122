"""Facts about a format that does not state them itself: it is asked, with real blocks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

POINTS = 4097


def _read(fmt: Any, block: Any) -> Any:
    """Return the second element of each block as it is kept."""
    import torch

    root = torch.ones(()) if fmt.relative else None
    return fmt.decode(fmt.encode(block, root=root), root=root)[:, 0, 1].contiguous()


def _block(fmt: Any) -> Any:
    """Return blocks with a maximum of 1, and zeros."""
    import torch

    block = torch.zeros(POINTS, 1, max(fmt.block, 2))
    block[:, 0, 0] = 1.0
    return block


@lru_cache(maxsize=1024)
def stuck(fmt: Any, decay: float) -> tuple[int, float, str]:
    """Measure `Format.stuck` of values of 0 to 1 under a block maximum of 1."""
    import torch

    block = _block(fmt)
    block[:, 0, 1] = torch.linspace(0, 1, POINTS)
    once = _read(fmt, block)
    block[:, 0, 1] = once * decay
    kept = once[(_read(fmt, block) == once) & (once != 0)].unique()
    return len(kept), float(kept.max()) if len(kept) else 0.0, "block's maximum"


@lru_cache(maxsize=1024)
def cell(fmt: Any) -> float:
    """Measure `Format.cell`: of values down to 2^-16 under a block maximum of 1 and the next numbers below what they
    are kept as, which bisection finds; inf where that is 0 or below."""
    import torch

    fmt = fmt.of_vectors()
    block = _block(fmt)

    def kept(patterns: Any) -> Any:
        block[:, 0, 1] = patterns.view(torch.float32)
        return _read(fmt, block)

    value = kept(torch.logspace(-16, 0, POINTS, base=2.0).view(torch.int32))
    low, high = torch.zeros(POINTS, dtype=torch.int32), value.view(torch.int32)
    while int((high - low).max()) > 1:
        middle = low + ((high - low) >> 1)
        below = kept(middle) < value
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    below = kept(low)
    return float((value / below - 1).max()) if bool((below > 0).all()) else math.inf


@lru_cache(maxsize=1024)
def keeps_zero(fmt: Any) -> bool:
    """Measure `Format.keeps_zero` of one 0 under a block maximum of 1."""
    fmt = fmt.of_vectors()
    return float(_read(fmt, _block(fmt)[:1])[0]) == 0.0
