"""An input that is read where another one was fed."""

from optgen.lang import flag, hyper, input, optimizer


@optimizer(cite="none")
def curved(p, g, probe=input(), product=input(), *, lr=hyper(0.1, ge=0), fresh=flag(fed="product"),
           probed=flag(fed="probe")):  # fmt: skip
    if fresh or probed:
        g = g * probe * product
    p = p - lr * g
    return p
