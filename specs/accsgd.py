"""AccSGD: accelerated SGD by long and short steps."""

from optgen.lang import hyper, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Kidambi et al. 2018, arXiv:1803.05591; Jain et al. 2018, arXiv:1704.08227", name="AccSGD")
def accsgd(
    p, g,
    momentum_buffer=state(init="param"),
    *,
    lr=hyper(1e-3, ge=0),
    kappa=hyper(1000.0, gt=0, doc="the ratio of the long step to the short one"),
    xi=hyper(10.0, gt=0, doc="the advantage over SGD, at most the root of kappa"),
    constant=hyper(0.7, gt=0, lt=1, doc="the paper's constant of .7"),
    weight_decay=hyper(0.0, ge=0),
):
    """A running average of long steps, into which short ones are drawn; xi * constant^2 / kappa is at most 1."""
    g = l2(g, p, weight_decay)
    beta = xi * constant**2 / kappa
    zeta = constant / (constant + beta)
    momentum_buffer = momentum_buffer + beta * (p - momentum_buffer - lr * kappa / constant * g)
    p = p - lr * g
    p = p + (1 - zeta) * (momentum_buffer - p)
    return p, momentum_buffer
