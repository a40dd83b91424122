"""Apollo: a diagonal quasi-Newton method."""

from optgen.lang import amax, dot, elements, flag, hyper, maximum, optimizer, sqrt, state, total
from optgen.lang.policies import l2


@optimizer(cite="Ma 2020, arXiv:2009.13586", name="ApolloQN")
def apollo_qn(
    p, g, t,
    exp_avg_grad=state(),
    approx_hessian=state(),
    update=state(),
    *,
    lr=hyper(0.01, ge=0),
    beta=hyper(0.9, ge=0, lt=1, doc="the decay of the gradient's average"),
    eps=hyper(1e-4, gt=0),
    weight_decay=hyper(0.0, ge=0),
    belief=flag(False, doc="the least |B| is the largest change of the gradient"),
    decoupled=flag(False, doc="make the decay a part of the step"),
    stable=flag(False, doc="make the decay over the mean divisor a part of the step"),
):
    """Momentum over |B|, or over .01 where that is less; the weak secant equation updates B along the last step.

    With `belief` the least |B| is the largest change of the gradient, the paper's other `rebound`.  Decay that is
    `decoupled` is a part of the step along which B is updated, and so is `stable` decay, over the mean of the step's
    divisors.  The paper's warmup is a schedule of lr.
    """
    if not (decoupled or stable):
        g = l2(g, p, weight_decay)
    alpha = (1 - beta) / (1 - beta**t)
    change = g - exp_avg_grad
    exp_avg_grad = exp_avg_grad + alpha * change
    square = update * update
    length = sqrt(sqrt(total(square * square))) + (eps if belief else eps / 0.01)  # in the norm of fourth powers
    unit = update / length
    delta = -alpha * dot(change, unit) / length - total(approx_hessian * unit * unit)
    approx_hessian = approx_hessian + delta * unit * unit
    if belief:
        denom = maximum(abs(approx_hessian), amax(abs(change))) + eps / alpha
    else:
        denom = maximum(abs(approx_hessian), 0.01)
    update = exp_avg_grad / denom
    if stable:
        update = update + weight_decay / (total(denom) / elements(denom)) * p
    elif decoupled:
        update = update + weight_decay * p
    p = p - lr * update
    return p, exp_avg_grad, approx_hessian, update
