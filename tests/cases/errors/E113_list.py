from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def listed(p, g, *, lrs=hyper([1e-3, 1e-4], ge=0)):
    a, b = lrs
    p = p - (a + b) * g
    return p
