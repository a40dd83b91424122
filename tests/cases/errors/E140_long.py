from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def squared(p, g, *, lr=hyper(1e-3, ge=0)):
    for _ in range(1200):
        g = g * g - lr
    p = p - lr * g
    return p
