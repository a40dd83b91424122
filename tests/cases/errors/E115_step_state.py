from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def mistaken(p, g, t=state(), *, lr=hyper(1e-3, ge=0)):
    t = 0.9 * t + g
    p = p - lr * t
    return p, t
