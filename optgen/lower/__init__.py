"""Specs and formats -> programs: of a rule alone, and of each format's codecs."""

from optgen.lower.codec import CODE, CodecPrograms, X, lower_codec, lower_weight
from optgen.lower.program import differing, lower_rule, matrix_of, needs_matrix, relative, untouched

__all__ = [
    "CODE", "CodecPrograms", "X", "differing", "lower_codec", "lower_rule", "lower_weight", "matrix_of",
    "needs_matrix", "relative", "untouched",
]  # fmt: skip
