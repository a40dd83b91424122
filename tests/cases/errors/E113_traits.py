from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def traits(p, g, m=state([1]), *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
