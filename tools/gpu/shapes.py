"""Parameter lists of two well-known models, from their architectures."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shapes = list[tuple[int, ...]]


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """GPT-2 (Radford et al. 2019), the 124M model: 148 tensors, output and input embedding tied.

    >>> len(gpt2()), total(gpt2())
    (148, 124439808)
    """
    layer: Shapes = [
        *[(width,), (width,)],  # norm: weight, bias
        *[(width, 3 * width), (3 * width,)],  # query, key and value
        *[(width, width), (width,)],
        *[(width,), (width,)],
        *[(width, 4 * width), (4 * width,)],
        *[(4 * width, width), (width,)],
    ]
    return [(vocabulary, width), (context, width), *(layer * layers), (width,), (width,)]


def llama_8b(
    width: int = 4096, layers: int = 32, hidden: int = 14336, heads_width: int = 1024, vocabulary: int = 128256
) -> Shapes:
    """Llama 3.1 8B (Grattafiori et al. 2024): 291 tensors; `heads_width` is that of keys and of values.

    >>> len(llama_8b()), total(llama_8b())
    (291, 8030261248)
    """
    layer: Shapes = [
        *[(width, width), (heads_width, width), (heads_width, width), (width, width)],  # query, key, value, output
        *[(hidden, width), (hidden, width), (width, hidden)],  # gate, up, down
        *[(width,), (width,)],  # norms
    ]
    return [(vocabulary, width), *(layer * layers), (width,), (vocabulary, width)]


def total(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)
