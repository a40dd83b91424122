"""ACProp: the gradient over the root of a centred second moment that does not know it yet."""

from optgen.lang import hyper, maximum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Zhuang et al. 2021, arXiv:2110.05454", name="ACProp")
def acprop(
    p, g, t,
    exp_avg=state(),
    exp_avg_var=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the gradient and of its squared distance from the first",
    ),
    eps=hyper(1e-16, gt=0, doc="added to the squared distances, and to their root, which divides"),
    weight_decay=hyper(0.0, ge=0),
):
    """The second moment is of the gradient's distance from its average.  The first step is lr times the gradient.

    A gradient is divided by the root from before it, as in the authors' code: after zeros alone, by one of eps.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    before = exp_avg_var + where(t > 1, eps, 0.0)
    denom = sqrt(before) / sqrt(1 - beta2 ** maximum(t - 1, 1.0)) + eps
    p = p - lr * where(t > 1, g / denom, g)
    away = g - exp_avg
    exp_avg_var = beta2 * before + (1 - beta2) * away * away
    return p, exp_avg, exp_avg_var
