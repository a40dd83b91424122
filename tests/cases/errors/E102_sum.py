from optgen.lang import hyper, optimizer, state


@optimizer(cite="test")
def summed(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + 0.1 * g
    p = p - lr * m / sum(m * m)
    return p, m
