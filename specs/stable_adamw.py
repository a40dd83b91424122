"""StableAdamW: AdamW that takes smaller steps where the second moment lags behind the gradient."""

from optgen.lang import hyper, maximum, mean, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Wortsman et al. 2023, arXiv:2304.13013, algorithm 2", name="StableAdamW")
def stable_adamw(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(1e-2, ge=0),
):
    """AdamW with Adafactor's clipping: lr, of the decay too, is divided by RMS(g / root of second moment) above 1."""
    beta1, beta2 = betas
    beta1_hat = beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t)
    beta2_hat = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
    exp_avg = beta1_hat * exp_avg + (1 - beta1_hat) * g
    exp_avg_sq = beta2_hat * exp_avg_sq + (1 - beta2_hat) * g * g
    surprise = sqrt(mean(g * g / maximum(exp_avg_sq, eps * eps)))
    rate = lr / maximum(1.0, surprise)
    p = decoupled(p, rate, weight_decay)
    p = p - rate * exp_avg / (sqrt(exp_avg_sq) + eps)
    return p, exp_avg, exp_avg_sq
