from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def three(p, g, m=state(), *, betas=hyper((0.9, 0.99))):
    beta1, beta2, beta3 = betas
    m = beta1 * m + (1 - beta2) * g
    p = p - beta3 * m
    return p, m
