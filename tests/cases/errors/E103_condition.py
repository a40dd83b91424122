from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def chosen(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * where(m, 1.0, 0.0)
    return p, m
