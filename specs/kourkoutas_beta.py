"""Kourkoutas-beta: Adam whose second moment forgets faster when a tensor's gradient is longer than usual."""

from optgen.lang import (
    clip, flag, hyper, maximum, minimum, nonneg, norm, optimizer, sqrt, state, tensor_state, where,
)  # fmt: skip
from optgen.lang.policies import decoupled


@optimizer(cite="Kassinos 2025, arXiv:2508.12996", name="KourkoutasBeta")
def kourkoutas_beta(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    grad_ema=tensor_state(nonneg),
    beta2_product=tensor_state(nonneg, init=1.0, when="exact"),
    *,
    lr=hyper(1e-3, ge=0),
    beta1=hyper(0.9, ge=0, lt=1),
    beta2_max=hyper(0.999, ge=0, lt=1, doc="the largest beta2"),
    beta2_min=hyper(0.9, ge=0, lt=1, doc="the least beta2"),
    alpha=hyper(0.9, ge=0, lt=1, doc="the decay of the average norm"),
    tiny_spike=hyper(1e-8, gt=0, doc="added to the average norm"),
    warmup_steps=hyper(0, ge=0, doc="steps with beta2 halfway between"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    decay=hyper(0.98, ge=0, lt=1, doc="the decay of amsgrad's largest second moment"),
    amsgrad=flag(False),
    bias_correction=flag(False, doc="Adam's bias corrections, by beta2_max"),
    exact=flag(False, doc="bias corrections by the product of beta2"),
    max_ratio=hyper(3e38, gt=0, doc="the largest step, in units of lr"),
):
    """beta2 goes from beta2_max toward beta2_min by r / (1 + r), with r the norm over its average (alpha).

    In the first warmup_steps it is halfway between.  A layer is a tensor here.  `decay` is that of amsgrad's largest
    second moment, as in the authors' runs; bias corrections are those of beta2_max or, by `exact`, of the product of
    beta2.  A step is at most lr * max_ratio.
    """
    length = norm(g)
    grad_ema = alpha * grad_ema + (1 - alpha) * length
    ratio = length / (grad_ema + tiny_spike)
    share = (1 - beta2_max) + (beta2_max - beta2_min) * where(t > warmup_steps, ratio / (1 + ratio), 0.5)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = (1 - share) * exp_avg_sq + share * g * g
    p = decoupled(p, lr, weight_decay)
    second = exp_avg_sq
    if amsgrad:
        max_exp_avg_sq = maximum(decay * max_exp_avg_sq, exp_avg_sq)
        second = max_exp_avg_sq
    if exact:
        beta2_product = (1 - share) * beta2_product
        step = lr / (1 - beta1**t) * exp_avg / (sqrt(second) / sqrt(1 - beta2_product) + eps)
    elif bias_correction:
        step = lr / (1 - beta1**t) * exp_avg / (sqrt(second) / sqrt(1 - beta2_max**t) + eps)
    else:
        step = lr * exp_avg / (sqrt(second) + eps)
    most = minimum(lr * max_ratio, 3e38)
    p = p - clip(step, -most, most)
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq, grad_ema, beta2_product
