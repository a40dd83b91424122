from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def averaged(p, g, m=state(), *, lr=hyper(1e-3, ge=0), betas=hyper((0.9, 0.99), ge=0, lt=1)):
    a, b = betas
    m = a * m + (1 - b) * g
    p = p - lr * m
    return p, m
