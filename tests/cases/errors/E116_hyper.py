from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def idle_hyper(p, g, m=state(), *, lr=hyper(1e-3), eps=hyper(1e-8)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
