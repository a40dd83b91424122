"""AdamS: AdamW whose second moment is that of the momentum and the gradient, with no state for it."""

from optgen.lang import hyper, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Zhang et al. 2025, arXiv:2505.16363", name="AdamS")
def adams(
    p, g,
    exp_avg=state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.95), ge=0, lt=1, doc="the decays of the momentum and of its square's share in the divisor"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.1, ge=0),
):
    """The momentum over the root of beta2 times the last momentum's square and 1 - beta2 times the gradient's."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    second = beta2 * exp_avg * exp_avg + (1 - beta2) * g * g
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    p = p - lr * exp_avg / (sqrt(second) + eps)
    return p, exp_avg
