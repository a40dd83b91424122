"""The embedding of 8-bit optimizers (Dettmers et al. 2022, arXiv:2110.02861, section 2.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optgen.runtime.records.fp32_modules import keep_states_fp32


class StableEmbedding(nn.Embedding):
    """nn.Embedding with Xavier uniform weights, a layer norm after the lookup, and optimizer states in fp32.

    Takes what nn.Embedding takes.  Rows of an embedding get gradients of very different sizes, and most of them none at
    all: the norm keeps the sizes together, and every optgen optimizer keeps the states of weight and norm in fp32,
    whatever its plan, without a further line (`keep_states_fp32`).

    forward   indices of any shape -> that shape and embedding_dim, in the weight's dtype; the norm is computed in fp32
              (fp64 for fp64 weights)
    ValueError for sparse=True: optimizers here read dense gradients.
    """

    norm: nn.LayerNorm

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.sparse:
            raise ValueError("StableEmbedding: sparse must be False, got True: its optimizers read dense gradients")
        self.norm = nn.LayerNorm(self.embedding_dim, device=self.weight.device, dtype=self.weight.dtype)
        keep_states_fp32(self)

    def reset_parameters(self) -> None:
        """Xavier uniform rows, zeros at padding_idx, and a norm that scales by 1."""
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()
        if "norm" in self._modules:  # nn.Embedding asks for first values before there is one
            self.norm.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        wide = torch.promote_types(found.dtype, torch.float32)
        norm = self.norm
        made = F.layer_norm(found.to(wide), norm.normalized_shape, norm.weight.to(wide), norm.bias.to(wide), norm.eps)
        return made.to(found.dtype)
