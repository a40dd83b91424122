"""ASGD: averaged stochastic gradient descent."""

from optgen.lang import hyper, maximum, optimizer, scalar, state, where
from optgen.lang.policies import l2


@optimizer(cite="Polyak & Juditsky 1992, SIAM J. Control Optim. 30(4)", like="torch.optim.ASGD", name="ASGD")
def asgd(
    p, g, t,
    ax=state(init="param"),
    eta=scalar(0.0),
    mu=scalar(1.0),
    *,
    lr=hyper(1e-2, ge=0),
    lambd=hyper(1e-4, ge=0, doc="the decay of the weight and of the rate"),
    alpha=hyper(0.75, ge=0, doc="the power by which the rate falls"),
    t0=hyper(1e6, ge=0, doc="the step from which weights are averaged"),
    weight_decay=hyper(0.0, ge=0),
):
    """SGD with a decaying rate, beside an average of the weights from step t0 on: the state ax, which no step reads."""
    g = l2(g, p, weight_decay)
    rate = where(t > 1, eta, lr)
    p = p * (1 - lambd * rate) - rate * g
    ax = ax + mu * (p - ax)
    eta = lr / (1 + lambd * lr * t) ** alpha
    mu = 1 / maximum(1.0, t - t0)
    return p, ax, eta, mu
