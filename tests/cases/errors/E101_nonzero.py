from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def decayed(p, g, *, lr=hyper(1e-3, ge=0), weight_decay=hyper(0.0, ge=0)):
    if weight_decay != 0:
        g = g + weight_decay * p
    p = p - lr * g
    return p
