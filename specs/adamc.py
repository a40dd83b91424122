"""AdamC: AdamW whose decay follows the square of the schedule, for layers before a normalization."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, scalar, sqrt, state
from optgen.lang.policies import decoupled, schedule_of


@optimizer(cite="Defazio 2025, arXiv:2506.02285", name="AdamC")
def adamc(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    peak_lr=scalar(0.0),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(1e-2, ge=0),
    normalized=flag(True, doc="False for weights that no normalization follows: they decay as under AdamW"),
):
    """AdamW with a decay of lr^2 / (largest lr so far).

    normalized=False, of a group, gives weights that no normalization follows AdamW's own decay.
    """
    beta1, beta2 = betas
    peak_lr = maximum(peak_lr, lr)
    p = decoupled(p, lr * schedule_of(lr, peak_lr) if normalized else lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, peak_lr
