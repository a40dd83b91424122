"""SNGM: momentum of gradients of one length."""

from optgen.lang import hyper, maximum, model_norm, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Zhao et al. 2020, arXiv:2007.13985", name="SNGM")
def sngm(
    p, g,
    momentum_buffer=state(),
    *,
    lr=hyper(1e-2, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum"),
    weight_decay=hyper(0.0, ge=0),
):
    """The gradient of the model is divided by its norm, and then summed."""
    g = l2(g, p, weight_decay)
    momentum_buffer = momentum * momentum_buffer + g / maximum(model_norm(g), 1e-30)
    p = p - lr * momentum_buffer
    return p, momentum_buffer
