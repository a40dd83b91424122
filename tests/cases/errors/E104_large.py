from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def bounded(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + where(abs(g) < 1e39, g, 0.0)
    p = p - lr * m
    return p, m
