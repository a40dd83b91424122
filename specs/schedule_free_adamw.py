"""Schedule-Free AdamW: no decay of the learning rate; the model is evaluated with an average of its weights."""

from optgen.lang import flag, hyper, maximum, minimum, nonneg, optimizer, scalar, sqrt, state


def average(p, z, z_offset, *, betas):
    """x from y and z: what to evaluate, and what to keep in the end."""
    return p + (1 - 1 / betas[0]) * (z - p + z_offset)


@optimizer(cite="Defazio et al. 2024, arXiv:2405.15682", name="ScheduleFreeAdamW", evaluate=average)
def schedule_free_adamw(
    p, g, t,
    z=state(init="param", when="not compact"),
    z_offset=state(when="compact"),
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
    warmup_steps=hyper(0, ge=0, doc="steps over which the rate rises"),
    r=hyper(0.0, ge=0, doc="the power of t that weighs the average"),
    weight_lr_power=hyper(2.0, ge=0, doc="the power of the largest rate that weighs the average"),
    compact=flag(False, doc="keep z - y in place of z, which takes fewer bits"),
):
    """Schedule-Free AdamW: no decay of the learning rate; the model is evaluated with an average of its weights.

    p is y, where gradients are taken; call eval() and train() of the optimizer with those of the model.
    compact keeps z as z - y, which plans of few bits keep in few bits (8 or more of them); z itself is fp32 there.
    """
    beta1, beta2 = betas
    rate = lr * minimum(1.0, t / maximum(warmup_steps, 1.0))
    lr_max = maximum(lr_max, rate)
    weight = t**r * lr_max**weight_lr_power
    weight_sum = weight_sum + weight
    c = weight / maximum(weight_sum, 1e-300)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    step = g / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps) + weight_decay * p
    p = p + c * (z_offset if compact else z - p) + rate * (beta1 * (1 - c) - 1) * step
    if compact:
        z_offset = (1 - c) * (z_offset - rate * beta1 * step)
    else:
        z = z - rate * step
    return p, z, z_offset, exp_avg_sq, weight_sum, lr_max
