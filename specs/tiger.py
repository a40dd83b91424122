"""Tiger: the sign of the momentum, tight-fisted with memory."""

from optgen.lang import hyper, optimizer, sign, state
from optgen.lang.policies import decoupled


@optimizer(cite="Su 2023, kexue.fm/archives/9512", like="pytorch_optimizer.Tiger")
def tiger(
    p, g,
    exp_avg=state(),
    *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.965, ge=0, lt=1, doc="the decay of the momentum"),
    weight_decay=hyper(0.01, ge=0),
):
    """The sign of the momentum, with decoupled weight decay: Lion with one beta."""
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta * exp_avg + (1 - beta) * g
    p = p - lr * sign(exp_avg)
    return p, exp_avg
