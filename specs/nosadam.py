"""NosAdam: Adam that weighs past gradients' squares more."""

from optgen.lang import flag, hyper, nonneg, optimizer, scalar, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Huang et al. 2018, arXiv:1805.07557", name="NosAdam")
def nosadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    weights=scalar(0.0),
    *,
    lr=hyper(1e-3, ge=0),
    beta1=hyper(0.9, ge=0, lt=1),
    gamma=hyper(0.1, ge=0, doc="the power of k that the square of step k weighs less by"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    bias_correction=flag(False, doc="the momentum's bias correction, of the authors' code"),
):
    """The second moment is the mean of the squares in which step k weighs k^-gamma (the paper's NosAdam-HH).

    bias_correction is the authors' code's, of the momentum.
    """
    g = l2(g, p, weight_decay)
    weight = t ** (-gamma)
    weights = weights + weight
    share = weight / weights
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = (1 - share) * exp_avg_sq + share * g * g
    rate = lr / (1 - beta1**t) if bias_correction else lr
    p = p - rate * exp_avg / (sqrt(exp_avg_sq) + eps)
    return p, exp_avg, exp_avg_sq, weights
