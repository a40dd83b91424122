"""AdaBound: Adam with bounds of the rate that close in on SGD's."""

from optgen.lang import clip, flag, hyper, maximum, nonneg, optimizer, scalar, sqrt, state
from optgen.lang.policies import l2, schedule_of


@optimizer(cite="Luo et al. 2019, arXiv:1902.09843", name="AdaBound")
def adabound(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsbound"),
    peak_lr=scalar(0.0),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    final_lr=hyper(0.1, ge=0, doc="the rate of SGD, on which the bounds close in"),
    gamma=hyper(1e-3, gt=0, doc="the speed at which the bounds close in"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    amsbound=flag(False, doc="divide by the largest second moment so far"),
):
    """Adam whose rate per element lies within bounds that close in on final_lr; with amsbound, AMSGrad's.

    final_lr follows the schedule: it is multiplied by lr / (largest lr so far). The authors' code divides by the first.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    peak_lr = maximum(peak_lr, lr)
    final = final_lr * schedule_of(lr, peak_lr)
    lower, upper = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsbound:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = max_exp_avg_sq if amsbound else exp_avg_sq
    rate = lr * sqrt(1 - beta2**t) / (1 - beta1**t) / (sqrt(second) + eps)
    p = p - clip(rate, lower, upper) * exp_avg
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq, peak_lr
