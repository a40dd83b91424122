from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def constant(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    p = p - lr * m * g
    m = 1.0
    return p, m
