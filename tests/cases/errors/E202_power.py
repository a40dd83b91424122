from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def to_the_gradient(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    p = p - lr * abs(m) ** g
    return p, m
