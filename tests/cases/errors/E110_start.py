from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def elsewhere(p, g, m=state(init="parm"), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
