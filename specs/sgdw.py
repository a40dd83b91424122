"""SGD with decoupled weight decay."""

from optgen.lang import flag, hyper, optimizer, state
from optgen.lang.policies import decoupled, heavy_ball


@optimizer(cite="Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 1", name="SGDW")
def sgdw(
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
    """SGD as torch.optim.SGD has it, but the decay shrinks the weight and leaves the momentum alone."""
    update = g
    if has_momentum:
        momentum_buffer = heavy_ball(momentum_buffer, g, t, momentum, dampening)
        update = g + momentum * momentum_buffer if nesterov else momentum_buffer
    p = decoupled(p, lr, weight_decay)
    p = p - lr * update
    return p, momentum_buffer
