"""A state that is never negative may still be -0; formats that order values by bit pattern must not see it."""

from __future__ import annotations

from pathlib import Path

import torch

from optgen.lang import hyper, minimum, nonneg, optimizer, state
from specs import plans
from tests import harness


@optimizer()
def negative_part(p, g, below=state(nonneg), *, lr=hyper(1e-3, ge=0)):
    """Keeps the size of the negative part of the gradient: -0 where that is 0."""
    below = -minimum(g, 0.0)
    p = p - lr * below
    return p, below


def test_minus_zero_decodes_as_the_smallest(tmp_path: Path) -> None:
    pair = harness.Pair(
        negative_part, harness.schedule(negative_part, plans.int8_split24, "float32", "strict"), tmp_path
    )
    g = torch.linspace(-1.0, 1.0, 64)  # one block: sizes from 1 down to 0, then -0
    kept = [pair.buffers((64,), torch.zeros(64)) for _ in range(2)]
    pair.run_reference(kept[0], g, 1, 0, 0)
    pair.run_triton(kept[1], g, 1, 0, 0)
    for name in kept[0]:
        assert harness.same_bits(kept[0][name], kept[1][name])
    codes = kept[0]["below"]
    assert codes[:32].min() > codes[32:].max(), "-0 was taken for a number"
