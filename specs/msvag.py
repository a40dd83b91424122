"""M-SVAG: momentum that is damped by the variance of the gradient."""

from optgen.lang import hyper, maximum, nonneg, optimizer, state, where


@optimizer(cite="Balles & Hennig 2018, arXiv:1705.07774", name="MSVAG")
def msvag(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-2, ge=0),
    beta=hyper(0.9, gt=0, lt=1, doc="the decay of both averages"),
):
    """The momentum times m^2 / (m^2 + its variance), which is 1 at the first step and 0 where the momentum is."""
    exp_avg = beta * exp_avg + (1 - beta) * g
    exp_avg_sq = beta * exp_avg_sq + (1 - beta) * g * g
    power = where(t > 1, beta**t, 0.0)
    rho = (1 - beta) * (1 + power) / ((1 + beta) * (1 - power))
    scale = where(t > 1, rho / (1 - rho), 0.0)
    m, v = exp_avg / (1 - beta**t), exp_avg_sq / (1 - beta**t)
    square = m * m
    noise = scale * maximum(v - square, 0.0)
    p = p - lr * m * where(square > 0, square / maximum(square + noise, 1e-37), 0.0)
    return p, exp_avg, exp_avg_sq
