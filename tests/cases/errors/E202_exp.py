from optgen.lang import exp, hyper, optimizer, state


@optimizer(cite="nobody")
def exponential(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * exp(m)
    return p, m
