from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def greek(p, g, *, lr=hyper(1e-3, ge=0)):
    é = lr * learning
    p = p - é * g
    return p
