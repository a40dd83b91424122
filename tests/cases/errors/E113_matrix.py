from optgen.lang import hyper, optimizer, row_mean


@optimizer(cite="nobody", matrix="rows")
def sideways(p, g, *, lr=hyper(1e-3)):
    p = p - lr * row_mean(g)
    return p
