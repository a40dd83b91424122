"""BCOS: momentum over a conditional estimate of its second moment, with no state for that."""

from optgen.lang import flag, hyper, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Jiang & Xiao 2025, arXiv:2507.08963", name="BCOS")
def bcos(
    p, g, t,
    m=state(),
    *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum"),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(0.1, ge=0),
    simple_cond=flag(False, doc="estimate the second moment by a mean of two squares"),
):
    """The paper's BCOS-c: the second moment of the next momentum, given the last one, which begins as the gradient.

    simple_cond takes the mean of the squares of the last momentum and the gradient, weighted by 1 - (1 - beta)^2.
    """
    p = decoupled(p, lr, weight_decay)
    last = where(t > 1, m, g)
    m = beta * last + (1 - beta) * g
    if simple_cond:
        of_old = 1 - (1 - beta) ** 2
        v = of_old * last * last + (1 - of_old) * g * g
    else:  # the paper's (3 beta^2 - 2 beta^3) m^2 + (1 - beta)^2 g^2 + 2 beta (1 - beta)^2 m g, as a sum of squares
        v = (1 - beta) ** 2 * (g + beta * last) ** 2 + beta**2 * (2 - beta**2) * last * last
    p = p - lr * m / (sqrt(v) + eps)
    return p, m
