"""Signum: the sign of the momentum."""

from optgen.lang import flag, hyper, optimizer, sign, state
from optgen.lang.policies import decoupled


@optimizer(cite="Bernstein et al. 2018, arXiv:1802.04434")
def signum(
    p, g,
    momentum_buffer=state(when="has_momentum"),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum; 0 keeps none"),
    weight_decay=hyper(0.0, ge=0),
    has_momentum=flag(nonzero="momentum"),
):
    """The sign of the momentum, with decoupled weight decay; signSGD where momentum is 0."""
    update = g
    if has_momentum:
        momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
        update = momentum_buffer
    p = decoupled(p, lr, weight_decay)
    p = p - lr * sign(update)
    return p, momentum_buffer
