"""FSGDM: a sum of gradients whose memory grows in stages of the run."""

from optgen.lang import floor, hyper, maximum, optimizer, state, where
from optgen.lang.policies import l2


@optimizer(cite="Li et al. 2024, arXiv:2411.19671", name="FSGDM")
def fsgdm(
    p, g, t,
    momentum_buffer=state(),
    *,
    lr=hyper(0.1, ge=0),
    weight_decay=hyper(5e-4, ge=0),
    c_scaling=hyper(0.033, gt=0, doc="the speed at which the momentum grows"),
    v_coefficient=hyper(1.0, ge=0, doc="a factor of the gradient"),
    n_stages=hyper(300, ge=1, whole=True, doc="the number of stages"),
    sigma=hyper(117000, ge=1, whole=True, doc="the number of steps of the run"),
):
    """The momentum is s / (s + c_scaling * sigma), with s the first step of the stage, one of n_stages of sigma steps.

    The first gradient is the buffer itself, as in the authors' code.
    """
    g = l2(g, p, weight_decay)
    stage = maximum(floor(sigma / n_stages), 1)
    start = stage * floor(t / stage)
    momentum_buffer = start / (start + c_scaling * sigma) * momentum_buffer + where(t > 1, v_coefficient, 1.0) * g
    p = p - lr * momentum_buffer
    return p, momentum_buffer
