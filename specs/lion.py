"""Lion: the sign of an interpolated momentum."""

from optgen.lang import hyper, optimizer, sign, state
from optgen.lang.policies import decoupled


@optimizer(cite="Chen et al. 2023, arXiv:2302.06675", like="pytorch_optimizer.Lion")
def lion(
    p, g,
    exp_avg=state(),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1, doc="the part of the average in the sign, and the decay of the average"),
    weight_decay=hyper(0.0, ge=0),
):
    """The sign of an interpolated momentum, with decoupled weight decay."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    update = sign(beta1 * exp_avg + (1 - beta1) * g)
    exp_avg = beta2 * exp_avg + (1 - beta2) * g
    p = p - lr * update
    return p, exp_avg
