from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def signed(p, g, m=state(), *, lr=hyper(1e-3, ge=0), wd=hyper(1e-2, ge=0)):
    m = 0.9 * m + g
    try:
        p = p - lr * m
        if p > 0:
            p = p * 2
    except Exception:
        p = p * wd
    return p, m
