from optgen.lang import hyper, nonneg, optimizer, sqrt, state


@optimizer(cite="nobody")
def no_eps(p, g, v=state(nonneg), *, lr=hyper(1e-3)):
    v = 0.9 * v + g * g
    p = p - lr * g / sqrt(v)
    return p, v
