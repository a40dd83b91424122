"""AdaBelief."""

from optgen.lang import flag, hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled
from specs.radam import rectification


@optimizer(cite="Zhuang et al. 2020, arXiv:2010.07468", name="AdaBelief")
def adabelief(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_var"),
    exp_avg_var=state(nonneg),
    max_exp_avg_var=state(nonneg, when="amsgrad"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the gradient and of its squared distance from the first",
    ),
    eps=hyper(1e-16, gt=0, doc="added to the squared distances at each step, and to their root, which divides"),
    weight_decay=hyper(0.0, ge=0),
    amsgrad=flag(False),
    rectify=flag(False, doc="rectify the rate, as RAdam does"),
):
    """Adam whose second moment is the gradient's distance from its own average: small where it was expected.

    `rectify` is RAdam's, and the default of the authors' package.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    surprise = g - exp_avg
    exp_avg_var = beta2 * exp_avg_var + (1 - beta2) * surprise * surprise + eps
    second = exp_avg_var
    if amsgrad:
        max_exp_avg_var = maximum(max_exp_avg_var, exp_avg_var)
        second = max_exp_avg_var
    if rectify:
        rho, rect = rectification(beta2, t)
        denom = where(rho > 5, 1 / (rect * sqrt(1 - beta2**t)) * (sqrt(second) + eps), 1.0)
    else:
        denom = sqrt(second) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_var, max_exp_avg_var
