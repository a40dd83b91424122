from optgen.lang import hyper, nonneg, optimizer, row, row_mean, state


@optimizer(cite="nobody")
def of_rows(p, g, m=state(normalized_by="v"), v=row(nonneg), *, lr=hyper(1e-3)):
    v = 0.9 * v + row_mean(g * g)
    m = 0.9 * m + g
    p = p - lr * m
    return p, m, v
