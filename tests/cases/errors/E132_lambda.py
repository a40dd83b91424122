from optgen.lang import hyper, optimizer


short = optimizer(cite="nobody")(lambda p, g, *, lr=hyper(1e-3, ge=0): p - lr * g)
