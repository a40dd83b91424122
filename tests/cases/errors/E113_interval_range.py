from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def at_times(p, g, m=state(), *, lr=hyper(1e-3, ge=0), k=hyper(10.0, gt=0), sync=flag(every="k")):
    m = 0.9 * m + g
    if sync:
        p = p - lr * m
    return p, m
