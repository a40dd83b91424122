"""Yogi."""

from optgen.lang import hyper, nonneg, optimizer, sign, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Zaheer et al. 2018, NeurIPS 31")
def yogi(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-2, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decay of the gradient's average, and 1 less the part of a square that exp_avg_sq moves by",
    ),
    initial_accumulator=hyper(1e-6, ge=0, doc="the first second moment"),
    eps=hyper(1e-3, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam whose second moment moves toward the squared gradient by an amount that does not depend on the gap.

    Bias corrections are Adam's; the paper's algorithm 2 has none.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    square = g * g
    exp_avg_sq = exp_avg_sq + where(t > 1, 0.0, initial_accumulator)
    exp_avg_sq = exp_avg_sq - (1 - beta2) * sign(exp_avg_sq - square) * square
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq
