from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def gated(p, g, in_gate=state(), *, lr=hyper(1e-3)):
    in_gate = 0.9 * in_gate + g
    p = p - lr * in_gate
    return p, in_gate
