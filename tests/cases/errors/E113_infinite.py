from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def plain(p, g, *, lr=hyper(1e-3, ge=0), bound=hyper(float("inf"), gt=0)):
    p = p - lr * g / bound
    return p
