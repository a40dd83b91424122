"""INNAprop: inertial Newton dynamics of the gradient over the root of its second moment."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Bolte et al. 2024, arXiv:2410.05871, algorithm 1", name="INNAprop")
def innaprop(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    alpha=hyper(0.1, ge=0, doc="the viscous friction"),
    beta=hyper(0.9, ge=0, doc="the Hessian damping"),
    sigma=hyper(0.999, ge=0, lt=1, doc="the decay of the average square"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.01, ge=0),
):
    """Viscous friction alpha and Hessian damping beta, with no Hessian.

    At alpha = beta = 1 it is AdamW without momentum; lr * alpha must be below 1.
    """
    p = decoupled(p, lr, weight_decay)
    exp_avg_sq = sigma * exp_avg_sq + (1 - sigma) * g * g
    scaled = g / (sqrt(exp_avg_sq) / sqrt(1 - sigma**t) + eps)
    kept = 1 - alpha * lr
    exp_avg = kept * exp_avg + lr * lr * (1 - alpha * beta) / kept * scaled
    p = p - exp_avg - lr * (beta - lr) / kept * scaled
    return p, exp_avg, exp_avg_sq
