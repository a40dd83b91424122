from optgen.lang import hyper, optimizer, state, where


@optimizer(cite="nobody")
def yes_or_no(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = m * g > 0
    p = p - where(m, lr, 0.0)
    return p, m
