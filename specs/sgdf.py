"""SGDF: gradients that a Wiener filter draws toward their average."""

from optgen.lang import flag, hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Yao et al. 2023, arXiv:2311.02818", name="SGDF")
def sgdf(
    p, g, t,
    exp_avg=state(),
    exp_var=state(nonneg),
    *,
    lr=hyper(1e-2, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the gradient and of its squared distance from the first",
    ),
    eps=hyper(1e-8, gt=0, doc="added to the denominator of the gain"),
    weight_decay=hyper(0.0, ge=0),
    of_average=flag(False, doc="take the variance of the average, as the authors' code does"),
    root_gain=flag(False, doc="take the root of the gain"),
):
    """The step is the average and the gradient's way from it times gain = variance / (variance + way^2).

    In the authors' code the variance is that of_average, and root_gain takes the gain's root, their gamma of .5.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    away = g - exp_avg
    exp_var = beta2 * exp_var + (1 - beta2) * away * away
    center, variance = exp_avg / (1 - beta1**t), exp_var / (1 - beta2**t)
    rest = g - center
    if of_average:
        variance = (1 - beta1) * (1 - beta1 ** (2 * t)) / (1 + beta1) * variance
    gain = variance / (variance + rest * rest + eps)
    if root_gain:
        gain = sqrt(gain)
    p = p - lr * (center + gain * rest)
    return p, exp_avg, exp_var
