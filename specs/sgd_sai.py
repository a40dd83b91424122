"""SGD-SaI: momentum at a rate per tensor that its first gradient sets."""

from optgen.lang import (
    dot, elements, flag, hyper, maximum, mean, nonneg, norm, optimizer, sqrt, state, tensor_state, where,
)  # fmt: skip
from optgen.lang.policies import decoupled


@optimizer(cite="Xu et al. 2024, arXiv:2411.10438", name="SGDSaI")
def sgd_sai(
    p, g,
    momentum_buffer=state(),
    gsnr=tensor_state(nonneg),
    *,
    lr=hyper(1e-2, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.01, ge=0),
    starts=flag(first=True),
):
    """gsnr, a ratio of signal to noise, is the norm of the first gradient over the standard deviation of its elements.

    Where that is 0, as of one element, it is the norm.  A tensor whose first gradient is 0 never moves.
    """
    if starts:
        away = g - mean(g)
        deviation = sqrt(dot(away, away) / maximum(elements(g) - 1.0, 1.0))
        gsnr = norm(g) / where(deviation > 0, deviation + eps, 1.0)
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    p = decoupled(p, lr, weight_decay)
    p = p - lr * gsnr * momentum_buffer
    return p, momentum_buffer, gsnr
