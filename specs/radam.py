"""RAdam: rectified Adam."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled, l2


def rectification(beta2, t):
    """RAdam's rho, and the factor of its steps where rho is above 5."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
    # Only rho > 5 is rectified; below it the limits keep the unused root real.
    r, r_inf = maximum(rho, 5.0), maximum(rho_inf, 5.0)
    return rho, sqrt((r - 4) * (r - 2) * r_inf / ((r_inf - 4) * (r_inf - 2) * r))


@optimizer(cite="Liu et al. 2020, arXiv:1908.03265", like="torch.optim.RAdam", name="RAdam")
def radam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    decoupled_weight_decay=flag(False),
):
    """Adam that steps along the momentum alone until its second moment has seen enough gradients."""
    beta1, beta2 = betas
    if decoupled_weight_decay:
        p = decoupled(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    rho, rect = rectification(beta2, t)
    adaptive = 1 / (rect * sqrt(1 - beta2**t))
    # Chosen, not multiplied by 0: an overflowed second moment must not reach the steps that do without it.
    denom = where(rho > 5, adaptive * (sqrt(exp_avg_sq) + eps), 1.0)
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_sq
