"""SGDP: momentum without the part of its step that only rescales a scale-invariant weight."""

from optgen.lang import flag, hyper, optimizer, shape_flag, state
from optgen.lang.policies import decoupled, without_radial


@optimizer(cite="Heo et al. 2021, arXiv:2006.08217, algorithm 1", name="SGDP", matrix="first")
def sgdp(
    p, g,
    momentum_buffer=state(),
    *,
    lr=hyper(0.1, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum; the weight decay is divided by 1 - momentum"),
    dampening=hyper(0.0),
    eps=hyper(1e-8, gt=0, doc="added to the norms that the cosine of weight and gradient is divided by"),
    weight_decay=hyper(0.0, ge=0),
    delta=hyper(0.1, ge=0, doc="the cosine below which a weight counts as scale-invariant"),
    wd_ratio=hyper(0.1, ge=0, le=1, doc="the part of its decay that such a weight has"),
    nesterov=flag(False),
    projected=shape_flag(lambda shape: len(shape) >= 2),
):
    """Momentum; a weight that looks scale-invariant decays less and is not rescaled by its step."""
    momentum_buffer = momentum * momentum_buffer + (1 - dampening) * g
    update = g + momentum * momentum_buffer if nesterov else momentum_buffer
    weight_decay = weight_decay / (1 - momentum)
    if projected:
        update, invariant = without_radial(update, p, g, delta, eps)
        weight_decay = weight_decay * (1 - (1 - wd_ratio) * invariant)
    p = decoupled(p, lr, weight_decay)
    p = p - lr * update
    return p, momentum_buffer
