"""Spec + storage -> Program: the only room that sees both halves."""

from optgen.lower.program import lower, lower_decode, lower_encode

__all__ = ["lower", "lower_decode", "lower_encode"]
