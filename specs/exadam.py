"""EXAdam: Adam with corrections of each moment by the other."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Adly 2024, arXiv:2412.20302", name="EXAdam")
def exadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam's moments with cross-moment corrections, which vanish late, and the gradient besides the first of them."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    square = exp_avg * exp_avg
    of_first = 1 + beta2**t * (exp_avg_sq / (exp_avg_sq + eps))
    of_second = 1 + beta1**t * (square / (square + eps))
    denom = sqrt(of_second * exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * (exp_avg + g) * of_first / denom
    return p, exp_avg, exp_avg_sq
