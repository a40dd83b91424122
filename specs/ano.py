"""Ano: the gradient's size along the momentum's sign."""

from optgen.lang import flag, hyper, log, maximum, nonneg, optimizer, sign, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Kegreisz 2025, arXiv:2508.18258")
def ano(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper(
        (0.92, 0.99), ge=0, lt=1,
        doc="the decay of the gradient's average, and 1 less the part of a square that exp_avg_sq moves by",
    ),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    logarithmic_schedule=flag(False, doc="beta1 is 1 - 1 / log(t)"),
):
    """|g| over the root of Yogi's second moment, with the momentum's sign.

    With logarithmic_schedule beta1 is 1 - 1 / log t.
    """
    beta1, beta2 = betas
    keep = 1 - 1 / log(maximum(t, 2.0)) if logarithmic_schedule else beta1
    p = decoupled(p, lr, weight_decay)
    exp_avg = keep * exp_avg + (1 - keep) * g
    square = g * g
    exp_avg_sq = maximum(beta2 * exp_avg_sq + (1 - beta2) * sign(square - exp_avg_sq) * square, 0.0)
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr * abs(g) * sign(exp_avg) / denom
    return p, exp_avg, exp_avg_sq
