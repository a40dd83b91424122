"""PID: SGD with a proportional, an integral and a derivative term."""

from optgen.lang import hyper, optimizer, state, where
from optgen.lang.policies import l2


@optimizer(cite="An et al. 2018, CVPR", name="PID")
def pid(
    p, g, t,
    grad_buffer=state(),
    i_buffer=state(),
    d_buffer=state(),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.9, gt=0, lt=1, doc="the decay of the momentum and of the average change of the gradient"),
    dampening=hyper(0.0, ge=0),
    derivative=hyper(10.0, ge=0, doc="the weight of the average change of the gradient"),
    integral=hyper(5.0, ge=0, doc="the weight of the momentum"),
    weight_decay=hyper(0.0, ge=0),
):
    """The gradient, its momentum (the integral) and the average of its changes (the derivative)."""
    g = l2(g, p, weight_decay)
    change = where(t > 1, g - grad_buffer, 0.0)
    i_buffer = momentum * i_buffer + (1 - dampening) * g
    d_buffer = momentum * d_buffer + (1 - momentum) * change
    p = p - lr * (g + integral * i_buffer + derivative * d_buffer)
    grad_buffer = g
    return p, grad_buffer, i_buffer, d_buffer
