"""Spec + storage -> Program: the only room that sees both halves."""

from optgen.lower.codec import CODE, CodecPrograms, X, lower_codec, lower_weight
from optgen.lower.program import differing, lower, lower_rule, matrix_of, needs_matrix, normalizer, untouched

__all__ = [
    "CODE", "CodecPrograms", "X", "differing", "lower", "lower_codec", "lower_rule", "lower_weight", "matrix_of",
    "needs_matrix", "normalizer", "untouched",
]  # fmt: skip
