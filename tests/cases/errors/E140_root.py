from optgen.lang import hyper, optimizer, sqrt, state


@optimizer(cite="nobody")
def root_of_signed(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * m / (1 + sqrt(m))
    return p, m
