"""SPAM: Adam with spikes of the gradient clipped and its moments begun anew now and then."""

from optgen.lang import floor, hyper, minimum, nonneg, optimizer, sign, sqrt, state, where
from optgen.lang.policies import decoupled


def half_cosine(share):
    """(1 + cos(pi * share)) / 2 for a number of the host in [0, 1]: the square of cos(x) at half of the angle."""
    x = (1.5707963267948966 * share) ** 2
    series = 1.0
    for k in range(11, 0, -1):
        series = 1 - x / (2 * k * (2 * k - 1)) * series
    return series * series


@optimizer(cite="Huang et al. 2025, arXiv:2501.06842", name="SPAM")
def spam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    warmup_epoch=hyper(50, ge=1, doc="steps over which the rate rises after a reset"),
    threshold=hyper(5000.0, gt=0, doc="the square, in units of exp_avg_sq, that is clipped"),
    grad_accu_steps=hyper(20, ge=1, doc="steps after a reset without clipping"),
    update_proj_gap=hyper(500, ge=2, whole=True, doc="steps between two resets"),
):
    """Elements whose square is above threshold * exp_avg_sq are clipped to that, but for grad_accu_steps steps.

    At multiples of update_proj_gap the moments begin at 0; those steps are the first, and the rate rises from .01 in
    warmup_epoch steps.  The bias corrections go on.  Sparse moments, the authors' `density`, are left out.
    """
    beta1, beta2 = betas
    since = t - update_proj_gap * floor(t / update_proj_gap)
    kept = where(since > 0, 1.0, 0.0)
    exp_avg, exp_avg_sq = kept * exp_avg, kept * exp_avg_sq
    bound = sqrt(exp_avg_sq) * sqrt(threshold)
    g = where((since >= grad_accu_steps) & (abs(g) > bound), sign(g) * bound, g)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    slow = where(t < update_proj_gap, 1.0, minimum((since + 1) / (warmup_epoch + 1), 1.0))
    rate = lr * (1 - 0.99 * half_cosine(slow)) * sqrt(1 - beta2**t) / (1 - beta1**t)
    p = p - rate * exp_avg / (sqrt(exp_avg_sq) + eps)
    p = decoupled(p, lr, weight_decay)
    return p, exp_avg, exp_avg_sq
