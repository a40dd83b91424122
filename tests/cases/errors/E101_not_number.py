from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - where(not m, lr, 0.0) * g
    return p, m
