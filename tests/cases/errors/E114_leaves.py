from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def renamed(param, grad, m=state(), *, lr=hyper(1e-3)):
    m = 0.9 * m + grad
    param = param - lr * m
    return param, m
