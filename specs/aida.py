"""Aida: AdaBelief with the gradient and the momentum projected on each other first."""

from optgen.lang import dot, hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2

PROJECTIONS = 2


@optimizer(cite="Zhang et al. 2022, arXiv:2203.13273")
def aida(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_var"),
    exp_avg_var=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the gradient and of the squared projected difference",
    ),
    xi=hyper(1e-20, gt=0, doc="added to squared lengths that divide a projection"),
    eps=hyper(1e-8, gt=0, doc="added to the squared differences at each step, and to their root, which divides"),
    weight_decay=hyper(0.0, ge=0),
):
    """The second moment is of the difference of the two after two mutual projections per tensor, the paper's K = 2."""
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    along, gg, mm = dot(g, exp_avg), dot(g, g), dot(exp_avg, exp_avg)
    of_g = of_m = 1.0
    for _ in range(PROJECTIONS):
        both = of_g * of_m * along
        of_g, of_m = of_g * (both / (of_g * of_g * gg + xi)), of_m * (both / (of_m * of_m * mm + xi))
    apart = of_m * exp_avg - of_g * g
    exp_avg_var = beta2 * exp_avg_var + (1 - beta2) * apart * apart + eps
    denom = sqrt(exp_avg_var) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * exp_avg / denom
    return p, exp_avg, exp_avg_var
