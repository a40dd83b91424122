"""NovoGrad: momentum of gradients that are normalized by each tensor's second moment."""

from optgen.lang import dot, flag, hyper, nonneg, optimizer, sqrt, state, tensor_state, where


@optimizer(cite="Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1", name="NovoGrad")
def novograd(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=tensor_state(nonneg),
    *,
    lr=hyper(1e-2, ge=0),
    betas=hyper((0.95, 0.98), ge=0, lt=1, doc="the decays of the momentum and of the squared norm"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    grad_averaging=flag(False, doc="multiply gradients by 1 - beta1"),
):
    """The second moment is one number per tensor, the squared length of its gradient, and starts as the first one."""
    beta1, beta2 = betas
    decay = where(t > 1, beta2, 0.0)
    exp_avg_sq = decay * exp_avg_sq + (1 - decay) * dot(g, g)
    update = g / (sqrt(exp_avg_sq) + eps) + weight_decay * p
    if grad_averaging:
        update = (1 - beta1) * update
    exp_avg = beta1 * exp_avg + update
    p = p - lr * exp_avg
    return p, exp_avg, exp_avg_sq
