from optgen.lang import hyper, optimizer


@optimizer(cite="nobody", name="My Rule")
def spaced(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * g
    return p
