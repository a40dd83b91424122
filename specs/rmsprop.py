"""RMSprop."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(
    cite="Tieleman & Hinton 2012, Coursera lecture 6e; centered: Graves 2013, arXiv:1308.0850",
    like="torch.optim.RMSprop",
    name="RMSprop",
)
def rmsprop(
    p, g,
    square_avg=state(nonneg),
    grad_avg=state(when="centered", normalized_by="square_avg"),
    momentum_buffer=state(when="has_momentum"),
    *,
    lr=hyper(1e-2, ge=0),
    alpha=hyper(0.99, ge=0, doc="the decay of the average square"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    momentum=hyper(0.0, ge=0, doc="the decay of the momentum; 0 keeps none"),
    centered=flag(False, doc="divide by the deviation of gradients"),
    has_momentum=flag(nonzero="momentum"),
):
    """The gradient divided by the root of a running mean of its square."""
    g = l2(g, p, weight_decay)
    square_avg = alpha * square_avg + (1 - alpha) * g * g
    variance = square_avg
    if centered:
        grad_avg = alpha * grad_avg + (1 - alpha) * g
        # A variance is never negative, but the rounding of what is stored can make this difference so.
        variance = maximum(square_avg - grad_avg * grad_avg, 0.0)
    update = g / (sqrt(variance) + eps)
    if has_momentum:
        momentum_buffer = momentum * momentum_buffer + update
        update = momentum_buffer
    p = p - lr * update
    return p, square_avg, grad_avg, momentum_buffer
