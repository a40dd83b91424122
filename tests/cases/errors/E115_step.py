from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def mistaken(p, g, *, lr=hyper(1e-3, ge=0), t=hyper(3.0)):
    p = p - lr * t * g
    return p
