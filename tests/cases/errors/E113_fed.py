"""Inputs of a flag that are no text."""

from optgen.lang import flag, hyper, input, optimizer


@optimizer(cite="none")
def curved(p, g, x=input(), y=input(), *, lr=hyper(0.1, ge=0), fresh=flag(fed=("x", "y"))):
    if fresh:
        g = g * x * y
    p = p - lr * g
    return p
