"""EAdam: Adam whose eps is added to the second moment in every step."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Yuan & Gao 2020, arXiv:2011.02150", name="EAdam")
def eadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0, doc="added to the average of squares at each step"),
    weight_decay=hyper(0.0, ge=0),
):
    """The divisor has no eps of its own: that of the second moment grows to eps / (1 - beta2)."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g + eps
    p = p - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * exp_avg / sqrt(exp_avg_sq)
    return p, exp_avg, exp_avg_sq
