from optgen.lang import hyper, optimizer, state


@optimizer(cite="test")
def averaged(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + 0.1 * np.abs(g)  # noqa: F821
    p = p - lr * m
    return p, m
