from optgen.lang import hyper, nonneg, optimizer, state


@optimizer(cite="nobody")
def below(p, g, v=state(nonneg, init="start"), *, lr=hyper(1e-3, ge=0), start=hyper(0.1)):
    v = v + g * g
    p = p - lr * g / (v + 1)
    return p, v
