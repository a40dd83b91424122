"""LARS: momentum whose rate, for each tensor, is in proportion to its weights and against its gradients."""

from optgen.lang import flag, hyper, norm, optimizer, state, where


@optimizer(cite="You, Gitman & Ginsburg 2017, arXiv:1708.03888, algorithm 1", name="LARS")
def lars(
    p, g,
    momentum_buffer=state(),
    *,
    lr=hyper(0.1, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum, which is a sum of steps with their rates"),
    weight_decay=hyper(5e-4, ge=0),
    trust_coefficient=hyper(1e-3, ge=0, doc="the length of a step, relative to the weight's"),
    nesterov=flag(False),
    dampening=hyper(0.0),
):
    """Momentum of the steps, each of a length in proportion to the weight's; plain where weight or gradient is 0."""
    weight_norm, grad_norm = norm(p), norm(g)
    ratio = trust_coefficient * weight_norm / (grad_norm + weight_decay * weight_norm)
    local_lr = where((weight_norm <= 0) | (grad_norm <= 0), 1.0, ratio)  # a NaN stays one
    step = lr * local_lr * (g + weight_decay * p)
    momentum_buffer = momentum * momentum_buffer + (1 - dampening) * step
    p = p - (step + momentum * momentum_buffer if nesterov else momentum_buffer)
    return p, momentum_buffer
