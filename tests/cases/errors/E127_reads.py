from optgen.lang import hyper, optimizer, state

HALF = 0.5


def average(p, z):
    return HALF * (p + z)


@optimizer(evaluate=average)
def averaged(p, g, z=state(init="param"), *, lr=hyper(1e-3)):
    z = z - lr * g
    p = p + 0.1 * (z - p)
    return p, z
