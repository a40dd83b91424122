from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def forever(p, g, m=state(), *, betas=hyper((0.9, 1.0), ge=0, lt=1)):
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta2) * g
    p = p - m
    return p, m
