"""D-Adaptation of SGD: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    flag, hyper, maximum, minimum, model_dot, model_norm, model_state, nonneg, optimizer, policies, state, where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733", name="DAdaptSGD")
def dadapt_sgd(
    p, g,
    s=state(),
    z_offset=state(when="has_momentum"),
    d=model_state(nonneg, init="d0"),
    g0_norm=model_state(nonneg),
    numerator_weighted=model_state(),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    momentum=hyper(0.0, ge=0, lt=1, doc="the weight of the average in each step of the weights; 0 keeps none"),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
    growth_rate=hyper(3e38, gt=0, doc="the factor by which the estimate grows at most in a step"),
    has_momentum=flag(nonzero="momentum"),
):
    """The estimate d is one for the whole model, and steps are relative to the norm of the first gradients.

    Momentum averages the weights: z_offset is from the weight to z, which takes the steps.  At lr = 0 nothing moves.
    """
    g = where(lr > 0, g, 0.0)
    size = model_norm(g)
    g = where(lr > 0, policies.l2(g, p, weight_decay), 0.0)
    g0_norm = where(g0_norm > 0, g0_norm, size)
    scale = where(g0_norm > 0, d / where(g0_norm > 0, g0_norm, 1.0), 0.0)
    numerator_weighted = numerator_weighted + scale * model_dot(lr * g, s)
    change = scale * lr * g
    s = s + change
    moved = where(lr > 0, s, 0.0)
    length = model_norm(moved)
    d_hat = 2 * numerator_weighted / maximum(length, 1e-37)
    d = maximum(d, where(length > 0, minimum(d_hat, d * growth_rate), 0.0))
    if has_momentum:
        kept = where(lr > 0, momentum, 1.0)
        change = change - z_offset
        z_offset = -kept * change
        change = (1 - kept) * change
    p = p - change
    return p, s, z_offset, d, g0_norm, numerator_weighted
