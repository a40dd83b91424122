"""AdaMod: Adam whose rates per element are bounded by their own averages."""

from optgen.lang import hyper, minimum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Ding et al. 2019, arXiv:1910.12249", name="AdaMod")
def adamod(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    exp_avg_lr=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    beta3=hyper(0.999, ge=0, lt=1, doc="the decay of the average of an element's rate"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam with the smaller of each element's rate and the average of that rate; eps is inside the correction."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    rate = lr * sqrt(1 - beta2**t) / (1 - beta1**t) / (sqrt(exp_avg_sq) + eps)
    exp_avg_lr = beta3 * exp_avg_lr + (1 - beta3) * rate
    p = p - minimum(rate, exp_avg_lr) * exp_avg
    return p, exp_avg, exp_avg_sq, exp_avg_lr
