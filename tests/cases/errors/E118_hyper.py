from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def heavy(p, g, m=state(), *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m


def case():
    heavy.evaluate(0.5, 0.1, 1, momentum=0.9)
