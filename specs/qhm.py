"""QHM: quasi-hyperbolic momentum."""

from optgen.lang import hyper, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Ma & Yarats 2019, arXiv:1810.06801", name="QHM")
def qhm(
    p, g,
    momentum_buffer=state(),
    *,
    lr=hyper(1.0, ge=0, doc="the learning rate of an average gradient; usual: 1"),
    momentum=hyper(0.999, ge=0, lt=1),
    nu=hyper(0.7, ge=0, le=1, doc="the share of the average"),
    weight_decay=hyper(0.0, ge=0),
):
    """A mean of the gradient and its average, of which nu is the average's share.

    The authors' code has no defaults; these are the paper's rule of thumb.
    """
    g = l2(g, p, weight_decay)
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    p = p - lr * ((1 - nu) * g + nu * momentum_buffer)
    return p, momentum_buffer
