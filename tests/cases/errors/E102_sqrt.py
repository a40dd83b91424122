import math

from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def root(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g * g
    p = p - lr * g / math.sqrt(m)
    return p, m
