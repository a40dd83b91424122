"""A2Grad: Nesterov's accelerated steps at a rate that the noise of the gradients sets."""

from optgen.lang import dot, flag, hyper, maximum, nonneg, optimizer, sqrt, state, tensor_state, where


@optimizer(cite="Deng, Cheng & Lan 2018, arXiv:1810.00553", name="A2Grad")
def a2grad(
    p, g, t,
    avg_grad=state(),
    x_offset=state(),
    v=tensor_state(nonneg),
    v_avg=tensor_state(nonneg, when="exponential"),
    *,
    lr=hyper(1.0, ge=0, doc="multiplies the paper's rate"),
    beta=hyper(10.0, ge=0, doc="the weight of the gradients' variance in the rate"),
    lips=hyper(10.0, gt=0, doc="the Lipschitz constant of the gradient, which bounds the rate"),
    rho=hyper(0.5, ge=0, le=1, doc="the decay of the average of squares, by exponential"),
    incremental=flag(False, doc="the paper's A2Grad-inc"),
    exponential=flag(False, doc="the paper's A2Grad-exp"),
):
    """A2Grad-uni, or with `incremental` or `exponential` the paper's A2Grad-inc or A2Grad-exp.

    v is of squared distances of gradients from their mean: a sum, one that shrinks by (t / (t + 1))^2, or the largest
    average.  x_offset is the paper's x less the weight.
    The paper has no learning rate: lr multiplies its rate, 1 / (2 lips / (t + 1) + beta h).
    """
    avg_grad = avg_grad + (g - avg_grad) / t
    away = g - avg_grad
    if incremental:
        v = (t / (t + 1)) ** 2 * v
    if exponential:
        v_avg = rho * v_avg + (1 - rho) * dot(away, away)
        v = maximum(v, v_avg)
    else:
        v = v + dot(away, away)
    h = sqrt(v) * (sqrt(t + 1) if incremental or exponential else 1.0)
    rate = lr / (2 * lips / (t + 1) + beta * h)
    last, share = where(t > 1, 2 / (t + 2), 1.0), 2 / (t + 3)
    moved = x_offset - rate * g
    p = p + share * moved - (1 - share) * last * rate * g
    x_offset = (1 - share) * (moved + last * rate * g)
    return p, avg_grad, x_offset, v, v_avg
