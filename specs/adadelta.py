"""Adadelta."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Zeiler 2012, arXiv:1212.5701", like="torch.optim.Adadelta")
def adadelta(
    p, g,
    square_avg=state(nonneg),
    acc_delta=state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the step; usual: 1"),
    rho=hyper(0.9, ge=0, le=1, doc="the decay of both averages of squares"),
    eps=hyper(1e-6, ge=0, doc="added under both roots"),
    weight_decay=hyper(0.0, ge=0),
):
    """Steps in the units of the weight: the gradient times RMS(past steps) / RMS(gradients)."""
    g = l2(g, p, weight_decay)
    square_avg = rho * square_avg + (1 - rho) * g * g
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * g
    acc_delta = rho * acc_delta + (1 - rho) * delta * delta
    p = p - lr * delta
    return p, square_avg, acc_delta
