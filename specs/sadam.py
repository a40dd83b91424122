"""SAdam: Adam with a softplus of the root of the second moment for its divisor."""

from optgen.lang import exp, hyper, log, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Tong et al. 2019, arXiv:1908.00700", name="SAdam")
def sadam(
    p, g,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    sharpness=hyper(50.0, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """The divisor is log(1 + exp(sharpness * x)) / sharpness, the paper's beta; it is at least log(2) / sharpness.

    There are no bias corrections, as in the paper.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    root = sqrt(exp_avg_sq)
    p = p - lr * exp_avg / (root + log(1 + exp(-sharpness * root)) / sharpness)
    return p, exp_avg, exp_avg_sq
