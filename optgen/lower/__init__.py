"""Spec + storage -> Program: the only room that sees both halves."""

from optgen.lower.program import lower, lower_decode, lower_encode, matrix_of, needs_matrix, untouched

__all__ = ["lower", "lower_decode", "lower_encode", "matrix_of", "needs_matrix", "untouched"]
