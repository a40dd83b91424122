"""Random numbers of rows."""

from optgen.lang import hyper, optimizer, uniform, where


@optimizer(cite="none")
def dropped(p, g, *, lr=hyper(0.1, ge=0)):
    p = p - lr * where(uniform(0, "row") < 0.5, g, 0.0)
    return p
