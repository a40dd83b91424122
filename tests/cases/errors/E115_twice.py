from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def shared(p, g, m=state(), *, betas=hyper((0.9, 0.99))):
    m, beta2 = betas
    m = m * g
    p = p - beta2 * m
    return p, m
