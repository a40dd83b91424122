from optgen.lang import hyper, newton_schulz, norm, optimizer, state


@optimizer(cite="nobody")
def twice(p, g, m=state(), *, lr=hyper(1e-2, ge=0)):
    m = 0.9 * m + g
    first = newton_schulz(m, 2, (4.0, -6.0, 3.0))
    p = p - lr * newton_schulz(-first * norm(m), 3)
    return p, m
