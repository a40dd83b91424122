"""LaProp: momentum of the scaled gradient."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Ziyin, Wang & Ueda 2020, arXiv:2002.04839", name="LaProp")
def laprop(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(4e-4, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-15, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam with the two moments in the other order: the gradient is scaled first and averaged then.

    A step decays by lr * weight_decay; the authors' code decays by weight_decay alone.
    """
    beta1, beta2 = betas
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    scaled = g / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)
    exp_avg = beta1 * exp_avg + (1 - beta1) * scaled
    p = p - lr / (1 - beta1**t) * exp_avg
    p = decoupled(p, lr, weight_decay)
    return p, exp_avg, exp_avg_sq
