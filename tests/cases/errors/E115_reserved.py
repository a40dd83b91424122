from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def stepping(p, g, step=state(), *, lr=hyper(1e-3)):
    step = 0.9 * step + g
    p = p - lr * step
    return p, step
