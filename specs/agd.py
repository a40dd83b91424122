"""AGD: Adam whose second moment is of the change of the momentum, with a floor below which it is SGD."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Yue et al. 2023, arXiv:2312.01658", name="AGD")
def agd(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of the gradient and of its momentum's squared change"
    ),
    delta=hyper(1e-5, gt=0, doc="the least root that divides"),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(False),
):
    """The momentum is corrected for its bias before its change is taken; the first change is the gradient.

    Where the root of the second moment, corrected, is below delta the step is lr / delta times the momentum.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    last = exp_avg / (1 - beta1 ** maximum(t - 1, 1.0))
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    change = exp_avg / (1 - beta1**t) - where(t > 1, last, 0.0)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * change * change
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    correction = sqrt(1 - beta2**t)
    denom = maximum(sqrt(max_exp_avg_sq if amsgrad else exp_avg_sq), delta * correction)
    p = p - lr * correction / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq
