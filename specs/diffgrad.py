"""diffGrad: Adam with smaller steps where the gradient changes little."""

from optgen.lang import hyper, nonneg, optimizer, sigmoid, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Dubey et al. 2020, arXiv:1909.11015", name="DiffGrad")
def diffgrad(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    prev_grad=state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam's step times the sigmoid of the gradient's change since the last step, which is 1/2 to 1."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    friction = sigmoid(abs(prev_grad - g))
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * friction * exp_avg / denom
    prev_grad = g
    return p, exp_avg, exp_avg_sq, prev_grad
