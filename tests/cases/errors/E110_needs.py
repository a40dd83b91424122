from optgen.lang import flag, hyper, optimizer


@optimizer(cite="nobody")
def ahead(p, g, *, lr=hyper(1e-3), momentum=hyper(0.9), nesterov=flag(False, needs="momntum")):
    if nesterov:
        g = g + momentum * g
    p = p - lr * g
    return p
