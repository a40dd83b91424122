from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def misnamed(p, g, exp_avg=state(), *, lr=hyper(1e-3)):
    exp_av = 0.9 * exp_avg + g
    p = p - lr * exp_av
    return p, exp_av
