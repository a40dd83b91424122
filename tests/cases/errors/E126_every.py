from optgen.lang import flag, hyper, optimizer, state


@optimizer()
def now_and_then(p, g, slow=state(when="sync"), *, lr=hyper(1e-3), k=hyper(5, ge=1), sync=flag(every="k")):
    if sync:
        slow = slow + g
    p = p - lr * g
    return p, slow
