"""MARS: AdamW of a gradient from which its last change is extrapolated."""

from optgen.lang import hyper, maximum, nonneg, norm, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Yuan et al. 2024, arXiv:2411.10438, MARS-AdamW, approximate", name="MARS")
def mars(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    last_grad=state(),
    *,
    lr=hyper(3e-3, ge=0),
    betas=hyper((0.95, 0.99), ge=0, lt=1, doc="the decays of the averages of the corrected gradient and of its square"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    gamma=hyper(0.025, ge=0, doc="the weight of the gradient's change"),
):
    """AdamW of c = g + gamma * beta1 / (1 - beta1) * (g - last g), shortened to length 1 where it is longer."""
    beta1, beta2 = betas
    change = where(t > 1, g - last_grad, 0.0)
    c = g + gamma * beta1 / (1 - beta1) * change
    c = c / maximum(norm(c), 1.0)
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * c
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * c * c
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    last_grad = g
    return p, exp_avg, exp_avg_sq, last_grad
