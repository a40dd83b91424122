from optgen.lang import hyper, optimizer, state


@optimizer(cite="test")
def corrected(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + 0.1 * g
    p = p - lr * m / (1 - 0.9**t)  # noqa: F821
    return p, m
