from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def misspelt(p, g, m=state(when="has_momentum"), *, lr=hyper(1e-3, ge=0), momentum=hyper(0.9), has_momentum=flag(nonzero="momentun")):
    if has_momentum:
        m = momentum * m + g
    p = p - lr * g
    return p, m
