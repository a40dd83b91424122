from optgen.lang import hyper, newton_schulz, optimizer, state


@optimizer(cite="nobody", matrix="heads")
def everywhere(p, g, m=state(), *, lr=hyper(1e-2, ge=0)):
    m = 0.9 * m + g
    p = p - lr * newton_schulz(m)
    return p, m
