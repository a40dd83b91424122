"""MADGRAD: momentumized, adaptive, dual averaged gradient."""

from optgen.lang import cbrt, flag, hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Defazio & Jelassi 2022, arXiv:2101.11075", like="pytorch_optimizer.MADGRAD", name="MADGRAD")
def madgrad(
    p, g, t,
    grad_sum_sq=state(nonneg),
    s=state(),
    x0=state(when="has_momentum", init="param"),
    *,
    lr=hyper(1e-2, ge=0),
    momentum=hyper(0.9, ge=0, lt=1),
    weight_decay=hyper(0.0, ge=0),
    eps=hyper(1e-6, gt=0),
    has_momentum=flag(nonzero="momentum"),
):
    """Dual averaging: from the starting point x0 along the weighted sum of all gradients.

    lr + eps is the rate, as in the authors' code.
    """
    g = l2(g, p, weight_decay)
    start = x0 if has_momentum else p + s / (cbrt(grad_sum_sq) + eps)
    weight = (lr + eps) * sqrt(t)
    grad_sum_sq = grad_sum_sq + weight * g * g
    s = s + weight * g
    z = start - s / (cbrt(grad_sum_sq) + eps)
    p = p + (1 - momentum) * (z - p) if has_momentum else z
    return p, grad_sum_sq, s, x0
