"""Sophia: a momentum over a clipped estimate of the Hessian's diagonal, which the user feeds every few steps."""

from optgen.lang import clip, flag, hyper, input, maximum, optimizer, state
from optgen.lang.policies import decoupled


@optimizer(cite="Liu et al. 2023, arXiv:2305.14342, Algorithm 3", name="Sophia")
def sophia(
    p, g,
    exp_avg=state(),
    hessian_avg=state(),
    hessian=input(),
    *,
    lr=hyper(6e-4, ge=0),
    betas=hyper(
        (0.96, 0.99), ge=0, lt=1, doc="the decays of the averages of the gradient and of the Hessian's diagonal"
    ),
    gamma=hyper(0.01, gt=0, doc="a factor of the Hessian's diagonal"),
    eps=hyper(1e-12, gt=0, doc="the least divisor"),
    weight_decay=hyper(0.0, ge=0),
    fresh=flag(fed="hessian"),
):
    """Feed u * (H u) of a random u (Sophia-H), or the batch size times the squared gradient for labels drawn from the
    model (Sophia-G), every ten steps or so; other steps go on with the average."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    if fresh:
        hessian_avg = beta2 * hessian_avg + (1 - beta2) * hessian
    p = p - lr * clip(exp_avg / maximum(gamma * hessian_avg, eps), -1.0, 1.0)
    return p, exp_avg, hessian_avg
