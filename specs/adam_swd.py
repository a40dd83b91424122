"""Adam with stable weight decay (the authors' AdamS)."""

from optgen.lang import flag, hyper, maximum, model_total, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Xie et al. 2020, arXiv:2011.11152", name="AdamSWD")
def adam_swd(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(1e-4, ge=0),
    amsgrad=flag(False),
):
    """The decay's rate is lr over the root of the second moment's mean, one for the model.

    It is 0 where that root is not above eps, as without gradients.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = (max_exp_avg_sq if amsgrad else exp_avg_sq) / (1 - beta2**t)
    typical = sqrt(model_total(second) / model_total(0 * p + 1))
    p = decoupled(p, where(typical > eps, lr / (typical + eps), 0.0), weight_decay)
    p = p - lr / (1 - beta1**t) * exp_avg / (sqrt(second) + eps)
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq
