from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def importing(p, g, *, lr=hyper(1e-3, ge=0)):
    from optgen.lang import nosuch

    p = p - nosuch(lr * g)
    return p
