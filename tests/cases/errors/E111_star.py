from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def open_ended(p, g, *, lr=hyper(1e-3, ge=0), **others):
    p = p - lr * g
    return p
