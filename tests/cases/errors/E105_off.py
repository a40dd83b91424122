from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def carried(p, g, m=state(when="momentum"), *, lr=hyper(1e-3, ge=0), momentum=flag(False)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m
