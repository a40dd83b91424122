from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), *, lr=hyper(1e-3, ge=0), betas=hyper((0.9, 0.999), ge=0, lt=1)):
    m = betas[0] * m + (1 - betas[2]) * g
    p = p - lr * m
    return p, m
