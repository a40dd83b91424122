"""Stochastic gradient descent with momentum."""

from optgen.lang import flag, hyper, optimizer, state
from optgen.lang.policies import heavy_ball, l2


@optimizer(cite="Sutskever et al. 2013, ICML 30", like="torch.optim.SGD", name="SGD")
def sgd(
    p, g, t,
    momentum_buffer=state(when="has_momentum"),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.0, ge=0, doc="the decay of the momentum; 0 keeps none"),
    dampening=hyper(0.0),
    weight_decay=hyper(0.0, ge=0),
    nesterov=flag(False, needs="momentum", excludes="dampening"),
    has_momentum=flag(nonzero="momentum"),
):
    """Stochastic gradient descent with (Nesterov) momentum and L2 weight decay."""
    g = l2(g, p, weight_decay)
    update = g
    if has_momentum:
        momentum_buffer = heavy_ball(momentum_buffer, g, t, momentum, dampening)
        update = g + momentum * momentum_buffer if nesterov else momentum_buffer
    p = p - lr * update
    return p, momentum_buffer
