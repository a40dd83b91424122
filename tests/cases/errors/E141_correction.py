from optgen.lang import hyper, optimizer, sqrt, state


@optimizer(cite="nobody")
def unbounded(p, g, t, m=state(), *, lr=hyper(1e-3, ge=0), beta=hyper(0.9, ge=0, le=1)):
    m = beta * m + (1 - beta) * g
    p = p - lr / sqrt(1 - beta**t) * m
    return p, m
