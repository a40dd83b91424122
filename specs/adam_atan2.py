"""Adam with an arctangent in place of the division: no epsilon, and steps that do not depend on the loss's scale."""

from optgen.lang import atan2, hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Everett et al. 2024, arXiv:2407.05872", name="AdamAtan2")
def adam_atan2(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1),
    weight_decay=hyper(0.0, ge=0),
    out_scale=hyper(1.27, ge=0, doc="the paper's a, a factor of the step"),
    denom_scale=hyper(1.0, ge=0, doc="the paper's b, a factor of the second moment's root"),
):
    """The angle of the two averages, with decoupled weight decay; out_scale and denom_scale are the paper's a and b."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    p = p - lr * out_scale * atan2(exp_avg / (1 - beta1**t), denom_scale * sqrt(exp_avg_sq) / sqrt(1 - beta2**t))
    return p, exp_avg, exp_avg_sq
