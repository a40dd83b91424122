"""Functions of whole matrices, which torch computes between two sweeps."""

from __future__ import annotations

import torch
from torch import Tensor


def newton_schulz(x: Tensor, steps: float, a: float, b: float, c: float, eps: float) -> Tensor:
    """x (rows, columns), its singular values brought near 1: bf16; leading dimensions are a batch.

    In bf16 throughout, with the operations of torch.optim.Muon in its order, so that it gives the same bits.
    """
    if x.ndim > 3:
        return newton_schulz(x.flatten(0, -3), steps, a, b, c, eps).view(x.shape)
    x = x.to(torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(int(steps)):
        gram = x @ x.mT
        series = (
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if gram.ndim == 3
            else torch.addmm(gram, gram, gram, beta=b, alpha=c)
        )
        x = torch.baddbmm(x, series, x, beta=a) if x.ndim == 3 else torch.addmm(x, series, x, beta=a)
    return x if wide else x.mT
