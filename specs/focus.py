"""FOCUS: Signum drawn toward the average of its weights."""

from optgen.lang import hyper, optimizer, sign, state


@optimizer(cite="Liu et al. 2025, arXiv:2501.12243", name="FOCUS")
def focus(
    p, g, t,
    exp_avg=state(),
    away=state(),
    *,
    lr=hyper(1e-2, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of the gradient and of the weights"),
    gamma=hyper(0.1, ge=0, lt=1, doc="the weight of the pull to the average of weights"),
    weight_decay=hyper(0.0, ge=0),
):
    """The sign of the momentum, and gamma times that of the way from the average of weights, which the decay shrinks.

    The state `away` is that way, in place of the average: it begins at 0 and is as small as steps are.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    away = (beta2 - beta2**t) / (1 - beta2**t) * away
    shrunk = lr * weight_decay * (p - away)
    update = shrunk + lr * (sign(exp_avg) + gamma * sign(away - shrunk))
    p = p - update
    away = away - update
    return p, exp_avg, away
