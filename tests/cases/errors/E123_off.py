from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def eager(p, g, m=state(when="momentum"), *, lr=hyper(1e-3), momentum=flag(False)):
    m = g
    p = p - lr * g
    return p, m
