from optgen.lang import hyper, nonneg, optimizer, state


@optimizer(cite="nobody")
def signed_after_all(p, g, v=state(nonneg), *, lr=hyper(1e-3)):
    v = 0.9 * v + g
    p = p - lr * v
    return p, v
