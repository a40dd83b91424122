from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def mistaken(p, g, t, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * m * where(t in (1, 2), 0.0, 1.0)
    return p, m
