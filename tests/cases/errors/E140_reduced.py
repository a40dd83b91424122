from optgen.lang import hyper, norm, optimizer, state


@optimizer(cite="nobody")
def trusting(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * m * (norm(p) / norm(m))
    return p, m
