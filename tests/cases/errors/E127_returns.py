from optgen.lang import hyper, optimizer, state


def factor(p, z, *, betas):
    return 1 - betas[0]


@optimizer(evaluate=factor)
def averaged(p, g, z=state(init="param"), *, lr=hyper(1e-3), betas=hyper((0.9, 0.99), ge=0, lt=1)):
    beta1, beta2 = betas
    z = beta1 * z - lr * g
    p = p + (1 - beta2) * (z - p)
    return p, z
