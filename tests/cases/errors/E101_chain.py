from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def chain(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    small = -1 < m < 1
    p = p - where(small, lr, 0.0) * m
    return p, m
