"""VRAdam: AdamW whose rate falls where its momentum is long."""

from optgen.lang import flag, hyper, minimum, model_dot, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Vaidhyanathan et al. 2025, arXiv:2505.13196, algorithm 1", name="VRAdam")
def vradam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    beta3=hyper(1.0, ge=0, doc="the weight of the momentum's squared norm in the rate"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(1e-5, ge=0),
    lr_cutoff=hyper(10.0, ge=0, doc="the largest term of beta3 in the rate"),
    normgrad=flag(False, doc="the gradient's norm in place of the momentum's"),
):
    """The rate is lr / (1 + min(beta3 * |m|^2, lr_cutoff)), with m the momentum of the model or, by `normgrad`, g."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    along = g if normgrad else exp_avg
    rate = lr / (1 + minimum(beta3 * model_dot(along, along), lr_cutoff))
    p = decoupled(p, rate, weight_decay)
    p = p - rate / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)
    return p, exp_avg, exp_avg_sq
