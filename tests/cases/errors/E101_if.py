from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def trusty(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    ratio = g / lr
    if ratio > 1:
        g = g / ratio
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
