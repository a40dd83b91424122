from optgen.lang import hyper, optimizer


@optimizer()
def inner(p, g, *, lr=hyper(1e-3)):
    p = p - lr * g
    return p


@optimizer()
def outer(p, g, *, lr=hyper(1e-3)):
    p = inner(p, g, lr=lr)
    return p
