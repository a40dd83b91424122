from optgen.lang import optimizer, state


@optimizer(cite="nobody")
def bare(p, g, m=state(), *, lr=1e-3):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
