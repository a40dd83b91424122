from optgen.lang import hyper, nonneg, optimizer, row


@optimizer(cite="nobody")
def unreduced(p, g, r=row(nonneg), *, lr=hyper(1e-3)):
    r = 0.9 * r + g * g
    p = p - lr * g / (1 + r)
    return p, r
