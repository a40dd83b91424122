from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def neither(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    keep = not (m > 0)
    p = p - where(keep, lr, 0.0) * m
    return p, m
