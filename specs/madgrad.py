"""MADGRAD: momentumized, adaptive, dual averaged gradient."""

from optgen.lang import cbrt, flag, hyper, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import l2


@optimizer(cite="Defazio & Jelassi 2022, arXiv:2101.11075", name="MADGRAD")
def madgrad(
    p, g, t,
    grad_sum_sq=state(nonneg),
    s=state(),
    x0=state(when="has_momentum", init="param"),
    *,
    lr=hyper(1e-2, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the part of the weight that a step keeps; the rest is the new point's"),
    weight_decay=hyper(0.0, ge=0),
    eps=hyper(1e-6, ge=0, doc="added to lr, and to the cube root that divides"),
    decouple_decay=flag(
        False, doc="shrink the weight by lr * weight_decay, instead of adding the decay to the gradient"
    ),
    has_momentum=flag(nonzero="momentum"),
):
    """Dual averaging: from the starting point x0 along the weighted sum of all gradients.

    lr + eps is the rate, and 0 where lr is, as in the authors' code; eps may be 0.
    """
    old, rate = p, where(lr > 0, lr + eps, 0.0)
    if not decouple_decay:
        g = l2(g, p, weight_decay)
    before = cbrt(grad_sum_sq) + eps
    start = x0 if has_momentum else p + where(before > 0, s / before, 0.0)
    weight = rate * sqrt(t)
    grad_sum_sq = grad_sum_sq + weight * g * g
    s = s + weight * g
    denom = cbrt(grad_sum_sq) + eps
    z = start - where(denom > 0, s / denom, 0.0)
    p = p + (1 - momentum) * (z - p) if has_momentum else z
    if decouple_decay:
        p = p - rate * weight_decay * old
    return p, grad_sum_sq, s, x0
