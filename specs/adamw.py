"""Adam with decoupled weight decay."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, scalar, sqrt, state
from optgen.lang.policies import decoupled, schedule_of


@optimizer(cite="Loshchilov & Hutter 2019, arXiv:1711.05101", like="torch.optim.AdamW", name="AdamW")
def adamw(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    peak_lr=scalar(0.0, when="decouple_lr"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(1e-2, ge=0),
    amsgrad=flag(False),
    decouple_lr=flag(False, doc="let the decay follow the schedule alone: weight_decay * lr / (largest lr so far)"),
):
    """Adam with decoupled weight decay.

    With decouple_lr the decay follows the schedule alone: a step decays by weight_decay * lr / (largest lr so far).
    """
    beta1, beta2 = betas
    if decouple_lr:
        peak_lr = maximum(peak_lr, lr)
    rate = schedule_of(lr, peak_lr) if decouple_lr else lr
    p = decoupled(p, rate, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = max_exp_avg_sq if amsgrad else exp_avg_sq
    denom = sqrt(second) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq, peak_lr
