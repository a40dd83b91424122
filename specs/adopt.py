"""ADOPT: Adam that converges with any beta2."""

from optgen.lang import clip, flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled, l2


@optimizer(cite="Taniguchi et al. 2024, arXiv:2411.02853", name="ADOPT")
def adopt(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.9999), ge=0, lt=1, doc="the decays of the averages of scaled gradients and of squares"),
    eps=hyper(1e-6, gt=0, doc="the least root that divides"),
    weight_decay=hyper(0.0, ge=0),
    decoupled_weight_decay=flag(False),
    clipped=flag(True, doc="clip scaled gradients to (t - 1)^(1/4)"),
):
    """The gradient over the root of the second moment before it, clipped to (t - 1)^(1/4), then averaged.

    The first step only fills the second moment.
    """
    beta1, beta2 = betas
    if decoupled_weight_decay:
        p = decoupled(p, lr, where(t > 1, weight_decay, 0.0))
    else:
        g = l2(g, p, weight_decay)
    bound = (t - 1) ** 0.25
    scaled = g / maximum(sqrt(exp_avg_sq), eps)
    scaled = clip(scaled, -bound, bound) if clipped else where(t > 1, scaled, 0.0)
    exp_avg = beta1 * exp_avg + (1 - beta1) * scaled
    p = p - lr * exp_avg
    decay = where(t > 1, beta2, 0.0)
    exp_avg_sq = decay * exp_avg_sq + (1 - decay) * g * g
    return p, exp_avg, exp_avg_sq
