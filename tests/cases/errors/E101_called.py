from optgen.lang import hyper, minimum, optimizer, state


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    if minimum(m, 0.0):
        m = g
    p = p - lr * m
    return p, m
