from optgen.lang import hyper, log, optimizer, state


@optimizer(cite="nobody")
def logarithmic(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + log(abs(g))
    p = p - lr * m
    return p, m
