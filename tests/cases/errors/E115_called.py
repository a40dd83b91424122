from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def rooted(p, g, m=state(), *, root=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - root * m
    return p, m
