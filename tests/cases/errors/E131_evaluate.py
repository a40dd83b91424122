from optgen.lang import hyper, optimizer, state


def halfway(p, z):
    return p.lerp(z, 0.5)


@optimizer(evaluate=halfway)
def averaged(p, g, z=state(init="param"), *, lr=hyper(1e-3)):
    z = z - lr * g
    p = p + 0.1 * (z - p)
    return p, z
