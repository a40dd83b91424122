"""AggMo: aggregated momentum."""

from optgen.lang import hyper, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Lucas et al. 2019, arXiv:1804.00325", name="AggMo")
def aggmo(
    p, g,
    buffer1=state(),
    buffer2=state(),
    buffer3=state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.0, 0.9, 0.99), ge=0, lt=1, doc="the decays of the three momenta"),
    weight_decay=hyper(0.0, ge=0),
):
    """The mean of three momenta under decays of their own."""
    beta1, beta2, beta3 = betas
    g = l2(g, p, weight_decay)
    buffer1 = beta1 * buffer1 + g
    buffer2 = beta2 * buffer2 + g
    buffer3 = beta3 * buffer3 + g
    p = p - lr / 3 * (buffer1 + buffer2 + buffer3)
    return p, buffer1, buffer2, buffer3
