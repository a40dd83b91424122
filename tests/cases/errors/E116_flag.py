from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def idle_flag(p, g, m=state(), *, lr=hyper(1e-3), nesterov=flag(False)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
