"""LaProp: momentum of the scaled gradient."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Ziyin, Wang & Ueda 2020, arXiv:2002.04839", name="LaProp")
def laprop(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    exp_mean=state(when="centered", normalized_by="exp_avg_sq"),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(4e-4, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of scaled gradients and of squares"),
    eps=hyper(1e-15, gt=0, doc="added to the root that divides a gradient, before the average"),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(False),
    centered=flag(False, doc="divide by the deviation of gradients"),
    steps_before_using_centered=hyper(10, ge=0, doc="steps before `centered` divides by the deviation"),
):
    """Adam with the two moments in the other order: the gradient is scaled first and averaged then.

    A step decays by lr * weight_decay; the authors' code decays by weight_decay alone.  `centered` scales by the
    deviation, after some steps, from which on amsgrad's largest counts.
    """
    beta1, beta2 = betas
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    second, counts = exp_avg_sq, t > steps_before_using_centered
    if centered:
        exp_mean = beta2 * exp_mean + (1 - beta2) * g
        second = maximum(exp_avg_sq - where(counts, exp_mean * exp_mean, 0.0), 0.0)  # rounding makes it negative
    if amsgrad:
        largest = maximum(max_exp_avg_sq, second)
        max_exp_avg_sq = where(counts, largest, max_exp_avg_sq) if centered else largest
        second = where(counts, largest, second) if centered else largest
    scaled = g / (sqrt(second) / sqrt(1 - beta2**t) + eps)
    exp_avg = beta1 * exp_avg + (1 - beta1) * scaled
    p = p - lr / (1 - beta1**t) * exp_avg
    p = decoupled(p, lr, weight_decay)
    return p, exp_avg, exp_avg_sq, exp_mean, max_exp_avg_sq
