"""A docstring that no file of Python can have."""

from optgen.lang import hyper, optimizer


@optimizer(cite="none")
def plain(p, g, *, lr=hyper(0.1, ge=0)):
    """Steps of size \0.1."""
    p = p - lr * g
    return p
