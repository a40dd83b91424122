from optgen.lang import hyper, nonneg, optimizer, state


@optimizer(cite="nobody")
def swapped(p, g, m=state(), v=state(nonneg), *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    v = 0.9 * v + g * g
    p = p - lr * m / (v + 1)
    return p, v, m
