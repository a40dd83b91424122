from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def uncalled(p, g, m=state, *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
