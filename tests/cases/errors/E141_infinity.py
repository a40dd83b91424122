from optgen.lang import hyper, minimum, optimizer


@optimizer(cite="nobody")
def unbounded(p, g, *, lr=hyper(1e-3, ge=0)):
    d = minimum(g, float("inf"))
    p = p - lr * d
    return p
