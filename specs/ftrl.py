"""FTRL-Proximal: weights that follow from sums of gradients, and are 0 where an L1 penalty outweighs them."""

from optgen.lang import hyper, maximum, nonneg, optimizer, sign, sqrt, state, where


@optimizer(cite="McMahan et al. 2013, Ad click prediction, algorithm 1", name="FTRL")
def ftrl(
    p, g,
    z=state(),
    n=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.0, ge=0, doc="added to the root of the sum of squares"),
    lambda_1=hyper(0.0, ge=0, doc="the L1 penalty"),
    lambda_2=hyper(0.0, ge=0, doc="the L2 penalty"),
):
    """Adagrad's per-element rate, and an exact L1 penalty.

    A weight is a function of its own gradients alone: what it started from is gone after one step, and without a
    gradient it is 0.  Where lr is 0 nothing moves, the states neither.
    """
    g, rate, before = where(lr > 0, g, 0.0), where(lr > 0, lr, 1.0), sqrt(n)
    n = n + g * g
    z = z + g - (sqrt(n) - before) / rate * p
    size = maximum((beta + sqrt(n)) / rate + lambda_2, 1e-30)
    new = where(abs(z) > lambda_1, (sign(z) * lambda_1 - z) / size, 0.0)
    p = where(lr > 0, new, p)
    return p, z, n
