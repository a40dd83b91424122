from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def started(p, g, t, m=state(), *, lr=hyper(1e-3, ge=0)):
    if t == 1:
        m = g
    else:
        m = 0.9 * m + 0.1 * g
    p = p - lr * m
    return p, m
