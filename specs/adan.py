"""Adan: adaptive Nesterov momentum."""

from optgen.lang import flag, hyper, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled, proximal


@optimizer(cite="Xie et al. 2022, arXiv:2208.06677")
def adan(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_diff=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    prev_grad=state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.98, 0.92, 0.99), ge=0, lt=1,
        doc="the decays of the averages of the gradient, of its change, and of the square of both",
    ),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    no_prox=flag(False, doc="decay before the step, as AdamW does"),
):
    """Momentum of the gradient and of its change, over the root of their combined second moment.

    betas are the decays of the three averages: 1 - beta of the paper.  no_prox decays before the step, as AdamW does.
    """
    beta1, beta2, beta3 = betas
    change = where(t > 1, g - prev_grad, 0.0)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_diff = beta2 * exp_avg_diff + (1 - beta2) * change
    ahead = g + beta2 * change
    exp_avg_sq = beta3 * exp_avg_sq + (1 - beta3) * ahead * ahead
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta3**t) + eps
    avg_lr = lr / (1 - beta1**t)
    diff_lr = lr * beta2 / (1 - beta2**t)
    if no_prox:
        p = decoupled(p, lr, weight_decay)
    p = p - (avg_lr * exp_avg + diff_lr * exp_avg_diff) / denom
    if not no_prox:
        p = proximal(p, lr, weight_decay)
    prev_grad = g
    return p, exp_avg, exp_avg_diff, exp_avg_sq, prev_grad
