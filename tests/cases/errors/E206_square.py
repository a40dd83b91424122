from optgen.lang import eigenvectors, hyper, optimizer


@optimizer(cite="nobody", matrix="heads")
def mistaken(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - lr * eigenvectors(g)
    return p
