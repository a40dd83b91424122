from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def mistaken(p, g, m=state(), *, lr=hyper(1e-3, ge=0), weight_decay=hyper(0.0, ge=0)):
    m = 0.9 * m + g
    if not weight_decay:
        p = p - weight_decay * p
    p = p - lr * m
    return p, m
