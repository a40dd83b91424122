"""Adam."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled, l2


@optimizer(cite="Kingma & Ba 2015, arXiv:1412.6980; amsgrad: Reddi et al. 2018", like="torch.optim.Adam")
def adam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_exp_avg_sq=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(False),
    decoupled_weight_decay=flag(False),
):
    """Adam with L2 weight decay, or as AdamW has it."""
    beta1, beta2 = betas
    if decoupled_weight_decay:
        p = decoupled(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    second = max_exp_avg_sq if amsgrad else exp_avg_sq
    denom = sqrt(second) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, max_exp_avg_sq
