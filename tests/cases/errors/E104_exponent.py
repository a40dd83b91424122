from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def largest(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * abs(g) ** float("inf")
    return p
