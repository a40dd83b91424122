from optgen.lang import hyper, optimizer


@optimizer
def bare(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * g
    return p
