from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="test")
def both_up(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + 0.1 * g
    p = p - lr * where(m > 0 & g > 0, m, 0.0)
    return p, m
