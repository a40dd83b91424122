from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def scaled(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - 1e60 * lr * g
    return p
