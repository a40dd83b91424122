from optgen.lang import hyper, mat_mean, norm, optimizer


@optimizer(cite="nobody")
def coarse(p, g, *, lr=hyper(1e-3)):
    p = p - lr * g / (1 + mat_mean(norm(g)))
    return p
