"""Grokfast: AdamW of gradients whose slow part is amplified."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Lee et al. 2024, arXiv:2405.20233, algorithm 2", name="GrokFastAdamW")
def grokfast_adamw(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    grok_exp_avg=state(),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1),
    grokfast_alpha=hyper(0.98, ge=0, lt=1, doc="the decay of the slow gradient"),
    grokfast_lamb=hyper(2.0, ge=0, doc="the weight of the slow gradient"),
    grokfast_after_step=hyper(0, ge=0, doc="the step after which it is added"),
    eps=hyper(1e-8, gt=0, doc="the least root that divides"),
    weight_decay=hyper(0.0, ge=0),
    normalize_lr=flag(True, doc="divide the rate by 1 + grokfast_lamb"),
):
    """A moving average of gradients, which begins as the first, is added grokfast_lamb times.

    With normalize_lr the rate is divided by 1 + grokfast_lamb; the decay is too.
    """
    beta1, beta2 = betas
    rate = lr / (1 + grokfast_lamb) if normalize_lr else lr
    filters = where(t > grokfast_after_step, 1.0, 0.0)
    slow = where(t > 1, grok_exp_avg, g)
    grok_exp_avg = slow + filters * (1 - grokfast_alpha) * (g - slow)
    g = g + filters * grokfast_lamb * grok_exp_avg
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = maximum(sqrt(exp_avg_sq) / sqrt(1 - beta2**t), eps)
    p = decoupled(p, rate, weight_decay)
    p = p - rate / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, grok_exp_avg
