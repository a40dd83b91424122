from optgen.lang import hyper, nonneg, optimizer, sqrt, state


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), v=state(nonneg), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + sqrt(g.T)
    v = 0.9 * v + g * g
    p = p - lr * m / (sqrt(v) + 1e-8)
    return p, m, v
