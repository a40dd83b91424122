from optgen.lang import hyper, optimizer, state


def larger(p, z):
    if z > p:
        return z
    return p


@optimizer(evaluate=larger)
def averaged(p, g, z=state(init="param"), *, lr=hyper(1e-3)):
    z = z - lr * g
    p = p + 0.1 * (z - p)
    return p, z
