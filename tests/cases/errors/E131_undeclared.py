from optgen.lang import hyper, optimizer, state


@optimizer(cite="test")
def decayed(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + 0.1 * g
    p = p * (1 - lr * weight_decay) - lr * m  # noqa: F821
    return p, m
