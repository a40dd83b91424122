"""Schedule-Free RAdam: no schedule and no warmup; the model is evaluated with an average of its weights."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, scalar, sqrt, state, where


def average(p, z, *, betas):
    """x from y and z: what to evaluate, and what to keep in the end."""
    return p + (1 - 1 / betas[0]) * (z - p)


@optimizer(cite="Defazio et al. 2024, arXiv:2405.15682, with Liu et al. 2020's rectification", name="RAdamScheduleFree",
           evaluate=average)
def radam_schedule_free(
    p, g, t,
    z=state(init="param"),
    exp_avg_sq=state(nonneg),
    weight_sum=scalar(0.0),
    lr_max=scalar(0.0),
    *,
    lr=hyper(0.0025, ge=0),
    betas=hyper(
        (0.9, 0.999), gt=0, lt=1, doc="the interpolation of gradients' place, and the decay of the average square"
    ),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    r=hyper(0.0, ge=0, doc="the power of t that weighs the average"),
    weight_lr_power=hyper(2.0, ge=0, doc="the power of the largest rate that weighs the average"),
    silent_sgd_phase=flag(True, doc="make no steps before the rate can be rectified; False: steps of SGD"),
):
    """The rate is rectified as RAdam's, in the average's weights too; before, steps are 0, or SGD's.

    p is y, where gradients are taken; call eval() and train() of the optimizer with those of the model.
    """
    beta1, beta2 = betas
    correction = 1 - beta2**t
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / correction
    q, q_inf = maximum(rho, 4.1), maximum(rho_inf, 4.1)
    rectified = sqrt((q - 4) * (q - 2) * q_inf / ((q_inf - 4) * (q_inf - 2) * q))
    rate = lr * where(rho > 4, rectified, 0.0 if silent_sgd_phase else 1.0)
    lr_max = maximum(lr_max, rate)
    weight = t**r * lr_max**weight_lr_power
    weight_sum = weight_sum + weight
    c = weight / maximum(weight_sum, 1e-300)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    step = g / where(rho > 4, sqrt(exp_avg_sq) / sqrt(correction) + eps, 1.0) + weight_decay * p
    p = p + c * (z - p) + rate * (beta1 * (1 - c) - 1) * step
    z = z - rate * step
    return p, z, exp_avg_sq, weight_sum, lr_max
