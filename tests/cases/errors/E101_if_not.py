from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def neither(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    if not m > 0:
        p = p - lr * m
    return p, m
