"""Adagrad."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Duchi, Hazan & Singer 2011, JMLR 12", like="torch.optim.Adagrad")
def adagrad(
    p, g, t,
    sum=state(nonneg, init="initial_accumulator_value"),
    *,
    lr=hyper(1e-2, ge=0),
    lr_decay=hyper(0.0, ge=0, doc="the rate is lr / (1 + lr_decay * (step - 1))"),
    weight_decay=hyper(0.0, ge=0),
    initial_accumulator_value=hyper(0.0, ge=0, doc="the first sum of squares"),
    eps=hyper(1e-10, ge=0),
):
    """The gradient divided by the root of the sum of all its squares."""
    g = l2(g, p, weight_decay)
    sum = sum + g * g
    step_lr = lr / (1 + (t - 1) * lr_decay)
    p = p - step_lr * g / (sqrt(sum) + eps)
    return p, sum
