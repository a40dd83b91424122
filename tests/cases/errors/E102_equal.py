from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def same(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g
    changed = m == g
    p = p - lr * m * changed
    return p, m
