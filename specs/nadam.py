"""NAdam: Adam with Nesterov momentum."""

from optgen.lang import flag, hyper, nonneg, optimizer, scalar, sqrt, state
from optgen.lang.policies import decoupled, l2


@optimizer(cite="Dozat 2016, ICLR workshop", like="torch.optim.NAdam", name="NAdam")
def nadam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    mu_product=scalar(1.0),
    *,
    lr=hyper(2e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
    momentum_decay=hyper(4e-3, ge=0, doc="the speed at which the momentum warms up"),
    decoupled_weight_decay=flag(False),
):
    """Adam with Nesterov momentum, whose coefficient mu warms up to beta1."""
    beta1, beta2 = betas
    if decoupled_weight_decay:
        p = decoupled(p, lr, weight_decay)
    else:
        g = l2(g, p, weight_decay)
    mu = beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
    mu_product = mu_product * mu
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq / (1 - beta2**t)) + eps
    grad_lr = lr * (1 - mu) / (1 - mu_product)
    avg_lr = lr * mu_next / (1 - mu_product * mu_next)
    p = p - (grad_lr * g + avg_lr * exp_avg) / denom
    return p, exp_avg, exp_avg_sq, mu_product
