from optgen.driver.emit import class_row
from optgen.lang import flag, hyper, optimizer, shape_flag, state

LEAST = 2


@optimizer()
def shaped(p, g, m=state(when="wide"), *, lr=hyper(1e-3), wide=shape_flag(lambda shape: len(shape) >= LEAST)):
    if wide:
        m = 0.9 * m + g
    p = p - lr * (m if wide else g)
    return p, m


def case():
    class_row(shaped, ("fp32",))
