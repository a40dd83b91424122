"""AdamG: Adam with a golden step size, for which the rate stays 1."""

from optgen.lang import hyper, minimum, nonneg, optimizer, power, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Pan et al. 2024, arXiv:2405.04376", name="AdamG")
def adamg(
    p, g, t,
    m=state(normalized_by="v"),
    v=state(nonneg),
    r=state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="the largest rate; usual: 1"),
    betas=hyper(
        (0.95, 0.999, 0.95), ge=0, lt=1, doc="the decays of the gradient's, its square's and the numerator's averages"
    ),
    numerator=hyper(0.2, gt=0, doc="the paper's p"),
    exponent=hyper(0.24, gt=0, doc="the paper's q"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam of gradients times averages of numerator * v^exponent (p and q of the paper) at a rate of 1/sqrt(t) at most.
    """
    beta1, beta2, beta3 = betas
    g = l2(g, p, weight_decay)
    v = beta2 * v + (1 - beta2) * g * g
    r = beta3 * r + (1 - beta3) * (numerator * power(v, exponent))
    m = beta1 * m + (1 - beta1) * r * g
    denom = sqrt(v) / sqrt(1 - beta2**t) + eps
    p = p - minimum(lr, t**-0.5) / (1 - beta1**t) * m / denom
    return p, m, v, r
