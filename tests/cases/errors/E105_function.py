from optgen.lang import flag, hyper, maximum, optimizer, state


@optimizer(cite="nobody")
def carried(p, g, m=state(when="momentum"), *, lr=hyper(1e-3, ge=0), momentum=flag(False)):
    best = maximum(g, m) if momentum else maximum(g, m)
    p = p - lr * best
    return p, m
