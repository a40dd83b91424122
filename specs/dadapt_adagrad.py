"""D-Adaptation of AdaGrad: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    hyper, maximum, minimum, model_state, model_total, nonneg, optimizer, policies, sqrt, state, where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733", name="DAdaptAdaGrad")
def dadapt_adagrad(
    p, g,
    alphak=state(nonneg, init=1e-6),
    s=state(normalized_by="alphak"),
    x0=state(init="param"),
    d=model_state(nonneg, init="d0"),
    gsq_weighted=model_state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    momentum=hyper(0.0, ge=0, lt=1, doc="the weight of the average in each step of the weights; 0 keeps none"),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0, doc="the first estimate of the distance"),
    growth_rate=hyper(3e38, gt=0, doc="the factor by which the estimate grows at most in a step"),
):
    """The weight is its first value less a sum of gradients over a root of squares; momentum averages weights.

    The estimate d is one for the whole model.  Where lr is 0 nothing moves, and the sums leave it out.
    """
    g = where(lr > 0, policies.l2(g, p, weight_decay), 0.0)
    moves, kept = where(lr > 0, 1.0, 0.0), where(lr > 0, momentum, 1.0)
    alphak = alphak + g * g
    denom = sqrt(alphak) + eps
    s = s + d * lr * g
    gsq_weighted = gsq_weighted + d * d * model_total((lr * g) ** 2 / denom)
    total = model_total(moves * abs(s))
    d_hat = (model_total(moves * s * s / denom) - gsq_weighted) / maximum(total, 1e-37)
    p = kept * p + (1 - kept) * (x0 - s / denom)
    d = maximum(d, where(total > 0, minimum(d_hat, d * growth_rate), 0.0))
    return p, alphak, s, x0, d, gsq_weighted
