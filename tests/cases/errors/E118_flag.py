from optgen.lang import flag, hyper, optimizer, state


@optimizer(cite="nobody")
def heavy(p, g, m=state(), *, lr=hyper(1e-3), nesterov=flag(False)):
    m = 0.9 * m + g
    p = p - lr * (g + 0.9 * m if nesterov else m)
    return p, m


def case():
    heavy.trace({"nestorov": True})
