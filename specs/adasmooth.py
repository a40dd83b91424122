"""AdaSmooth: RMSprop whose second moment forgets fast where the weight goes straight on."""

from optgen.lang import hyper, minimum, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Lu 2022, arXiv:2204.00825", name="AdaSmooth")
def adasmooth(
    p, g,
    s=state(),
    n=state(nonneg),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.5, 0.99), ge=0, lt=1, doc="the least and the largest decay of the second moment"),
    eps=hyper(1e-6, gt=0, doc="added under the root that divides, and to the length of the path"),
    weight_decay=hyper(0.0, ge=0),
):
    """The decay of the second moment lies between betas by the effective ratio |s| / n.

    s is how far a weight has moved in all, n the length of the way, so that the ratio is at most 1.
    """
    beta1, beta2 = betas
    g = l2(g, p, weight_decay)
    share = (beta2 - beta1) * minimum(abs(s) / (n + eps), 1.0) + (1 - beta2)
    exp_avg_sq = (1 - share * share) * exp_avg_sq + share * share * (g * g)
    update = lr * g / sqrt(exp_avg_sq + eps)
    s = s - update
    n = n + abs(update)
    p = p - update
    return p, s, n, exp_avg_sq
