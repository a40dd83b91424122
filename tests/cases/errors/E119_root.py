from optgen.lang import flag, hyper, nonneg, optimizer, state


@optimizer(cite="nobody")
def sometimes(p, g, m=state(normalized_by="v"), v=state(nonneg, when="amsgrad"), *, lr=hyper(1e-3), amsgrad=flag(False)):
    if amsgrad:
        v = 0.9 * v + g * g
    m = 0.9 * m + g
    p = p - lr * m
    return p, m, v
