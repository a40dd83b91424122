from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def powered(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * g**1.5
    return p
