"""SAdam: Adam with a softplus of the root of the second moment for its divisor."""

from optgen.lang import exp, flag, hyper, log, maximum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Tong et al. 2019, arXiv:1908.00700", name="SAdam")
def sadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    sharpness=hyper(50.0, gt=0, doc="the sharpness of the softplus that divides, the paper's beta"),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(False),
    bias_correction=flag(False, doc="Adam's bias corrections, of the authors' code"),
):
    """The divisor is log(1 + exp(sharpness * x)) / sharpness, the paper's beta; it is at least log(2) / sharpness.

    Bias corrections are those of the authors' code; the paper has none.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    root = sqrt(max_exp_avg_sq if amsgrad else exp_avg_sq)
    rate = lr * sqrt(1 - beta2**t) / (1 - beta1**t) if bias_correction else lr
    p = p - rate * exp_avg / (root + log(1 + exp(-sharpness * root)) / sharpness)
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq
