from optgen.lang import col, col_mean, hyper, nonneg, optimizer, row, row_mean


@optimizer(cite="nobody")
def adafoo(p, g, r=row(nonneg), c=col(nonneg), *, lr=hyper(1e-3)):
    r = 0.9 * r + row_mean(g * g)
    c = 0.9 * c + col_mean(r)
    p = p - lr * g / (1 + r * c)
    return p, r, c
