"""Adai: SGD whose momentum, not its rate, adapts to each element."""

from optgen.lang import clip, flag, hyper, maximum, model_total, nonneg, optimizer, power, state
from optgen.lang.policies import decoupled as decay
from optgen.lang.policies import l2


@optimizer(cite="Xie et al. 2022, arXiv:2006.15815")
def adai(
    p, g, t,
    exp_avg=state(normalized_by="correction"),
    exp_avg_sq=state(nonneg),
    correction=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.1, 0.99), ge=0, lt=1,
        doc="beta0, by which an element's beta1 falls as its second moment grows, and the second moment's decay",
    ),
    eps=hyper(1e-3, gt=0, lt=1, doc="1 less the largest beta1, and the least mean of the second moments"),
    weight_decay=hyper(0.0, ge=0),
    decoupled=flag(False, doc="shrink the weight by lr * weight_decay, instead of adding the decay to the gradient"),
    dampened=flag(False, doc="take a gradient with the power `dampening` of 1 - beta1"),
    dampening=hyper(0.9, gt=0, le=1, doc="the power of 1 - beta1 that weighs a gradient under `dampened`"),
):
    """An element's beta1 is 1 - beta0 * v / (mean of v over the model), from 0 to 1 - eps.

    `correction` is 1 minus the product of its beta1s.  With `decoupled` decay it is the authors' AdaiV2.
    `dampened` is for their dampening of less than 1: the gain of a gradient is that power of 1 - beta1.
    """
    beta0, beta2 = betas
    if decoupled:
        p = decay(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    second = exp_avg_sq / (1 - beta2**t)
    typical = maximum(model_total(second) / model_total(0 * p + 1), eps)
    if dampened:
        beta1 = clip(1 - beta0 * power(second / typical, 1 / (3 - 2 * dampening)), 0.0, 1 - eps)
        gain, lr = power(1 - beta1, dampening), lr * beta0 ** (1 - dampening)
    else:
        beta1 = clip(1 - beta0 * second / typical, 0.0, 1 - eps)
        gain = 1 - beta1
    exp_avg = beta1 * exp_avg + gain * g
    correction = beta1 * correction + (1 - beta1)
    p = p - lr * exp_avg / correction
    return p, exp_avg, exp_avg_sq, correction
