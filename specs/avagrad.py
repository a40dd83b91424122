"""AvaGrad: Adam with the last second moment, and rates normalized over the model."""

from optgen.lang import hyper, model_state, model_total, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Savarese et al. 2019, arXiv:1912.01823", name="AvaGrad")
def avagrad(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    gamma=model_state(nonneg),
    *,
    lr=hyper(0.1, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(0.1, gt=0, doc="added to the root that divides; as large as 0.1 here, which brings steps near SGD's"),
    weight_decay=hyper(0.0, ge=0),
):
    """gamma is the root of the harmonic mean of the squares of all divisors; a first step only fills the moments.

    As in the authors' code gamma is made of the second moment before the gradient.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    root = sqrt(exp_avg_sq)
    before = where(t > 1, 1 - beta2 ** (t - 1), 1.0)
    moves = where(t > 1, lr / (1 - beta1**t), 0.0)
    p = p - moves * gamma * exp_avg / (root / sqrt(before) + eps)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    divisor = root / sqrt(1 - beta2**t) + eps
    gamma = sqrt(model_total(0 * p + 1) / model_total(1 / (divisor * divisor)))
    return p, exp_avg, exp_avg_sq, gamma
