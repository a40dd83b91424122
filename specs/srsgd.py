"""SRSGD: Nesterov momentum that grows with the steps and begins anew now and then."""

from optgen.lang import floor, hyper, optimizer, state
from optgen.lang.policies import l2


@optimizer(cite="Wang et al. 2020, arXiv:2002.10583", name="SRSGD")
def srsgd(
    p, g, t,
    ahead=state(),
    *,
    lr=hyper(0.1, ge=0),
    weight_decay=hyper(0.0, ge=0),
    restarting_iter=hyper(100, ge=2, whole=True, doc="steps after which the momentum begins anew"),
):
    """The momentum is (k - 1) / (k + 2), with k from 1 to restarting_iter - 1 and again from 1.

    `ahead` is how far the weight is ahead of the last plain step's, which the authors keep.
    """
    g = l2(g, p, weight_decay)
    rounds = restarting_iter - 1
    k = t - rounds * floor((t - 1) / rounds)
    ahead = (k - 1) / (k + 2) * (ahead - lr * g)
    p = p - lr * g + ahead
    return p, ahead
