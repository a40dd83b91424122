"""Spec + storage -> Program: the only room that sees both halves."""

from optgen.lower.codec import CodecPrograms, lower_codec, lower_weight
from optgen.lower.program import (
    differing,
    is_whole,
    lower,
    lower_divided,
    lower_rule,
    matrix_of,
    needs_matrix,
    normalizer,
    untouched,
)

__all__ = [
    "CodecPrograms", "differing", "is_whole", "lower", "lower_codec", "lower_divided", "lower_rule", "lower_weight",
    "matrix_of", "needs_matrix", "normalizer", "untouched",
]  # fmt: skip
