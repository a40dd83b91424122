"""FOCUS: Signum drawn toward the average of its weights."""

from optgen.lang import hyper, optimizer, sign, state, where


@optimizer(cite="Liu et al. 2025, arXiv:2501.12243", name="FOCUS")
def focus(
    p, g, t,
    exp_avg=state(),
    pbar=state(),
    *,
    lr=hyper(1e-2, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    gamma=hyper(0.1, ge=0, lt=1),
    weight_decay=hyper(0.0, ge=0),
):
    """The sign of the momentum, and gamma times that of the way from the average of weights, which the decay shrinks.

    At the first step the average is the weight itself, and the second sign 0.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    pbar = beta2 * pbar + (1 - beta2) * p
    center = pbar / (1 - beta2**t)
    p = p - lr * weight_decay * center
    away = where(t > 1, sign(p - center), 0.0)
    p = p - lr * (sign(exp_avg) + gamma * away)
    return p, exp_avg, pbar
