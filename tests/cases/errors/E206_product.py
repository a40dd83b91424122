from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * (m @ g)
    return p, m
