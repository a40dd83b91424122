from optgen.lang import hyper, optimizer


@optimizer(cite="nobody")
def stream(p, g, *, lr=hyper(1e-3, ge=0)):
    yield p - lr * g
