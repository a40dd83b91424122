from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def at_times(p, g, m=state(), *, lr=hyper(1e-3, ge=0), k=hyper(0, ge=0), sync=flag(every="k")):
    m = m + g
    if sync:
        p = p - lr * m
    return p, m
