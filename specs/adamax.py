"""Adamax."""

from optgen.lang import hyper, maximum, nonneg, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Kingma & Ba 2015, arXiv:1412.6980, Algorithm 2", like="torch.optim.Adamax")
def adamax(
    p, g, t,
    exp_avg=state(normalized_by="exp_inf"),
    exp_inf=state(nonneg),
    *,
    lr=hyper(2e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the decays of the average of the gradient and of the maximum"),
    eps=hyper(1e-8, ge=0, doc="added to the gradient's magnitude, so that the maximum is not 0"),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam with the infinity norm: a decaying maximum in place of the second moment."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_inf = maximum(beta2 * exp_inf, abs(g) + eps)
    p = p - lr / (1 - beta1**t) * exp_avg / exp_inf
    return p, exp_avg, exp_inf
