from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def halved(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    while lr > 1:
        lr = lr / 2
    p = p - lr * m
    return p, m
