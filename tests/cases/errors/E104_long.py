from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def plain(p, g, t, *, lr=hyper(1e-3, ge=0)):
    lr = lr / (t + 10**400)
    p = p - lr * g
    return p
