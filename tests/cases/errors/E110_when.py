from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def misspelt(p, g, m=state(when="amsgrd"), *, lr=hyper(1e-3, ge=0), amsgrad=flag(False)):
    if amsgrad:
        m = 0.9 * m + g
    p = p - lr * g
    return p, m
