from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def decaying(p, g, t, m=state(), *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - where(t > 1, lr / (t - 1), lr) * m
    return p, m
