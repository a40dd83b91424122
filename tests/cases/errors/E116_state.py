from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def idle_state(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    p = p - lr * g
    return p, m
