from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def in_place(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = m.mul_(0.9) + g
    p = p - lr * m
    return p, m
