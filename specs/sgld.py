"""Stochastic gradient Langevin dynamics: SGD whose noise makes it sample from the posterior."""

from optgen.lang import hyper, normal, optimizer, sqrt
from optgen.lang.policies import l2


@optimizer(cite="Welling & Teh 2011, ICML 28, equation 4", name="SGLD")
def sgld(
    p, g,
    *,
    lr=hyper(1e-3, ge=0, doc="twice the step along the gradient, and the variance of the noise"),
    temperature=hyper(1.0, ge=0, doc="a factor of the noise's variance"),
    weight_decay=hyper(0.0, ge=0),
):
    """Half a step of lr down the energy, whose gradient is g (minus that of the log posterior of all data), and noise
    of variance lr * temperature."""
    p = p - 0.5 * lr * l2(g, p, weight_decay) + sqrt(lr * temperature) * normal(0)
    return p
