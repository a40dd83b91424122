from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def largest(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = max(0.9 * m, g)
    p = p - lr * m
    return p, m
