"""A plan with a text that no file of Python can have."""

from optgen.formats import Plan


def case() -> None:
    Plan("half of a character: \ud800")
