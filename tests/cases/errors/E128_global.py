from optgen.lang import hyper, optimizer, state

SEEN = []


@optimizer(cite="nobody")
def counting(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    SEEN.append(1)
    m = m + len(SEEN) * g
    p = p - lr * m
    return p, m
