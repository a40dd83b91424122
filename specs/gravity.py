"""Gravity: a velocity of gradients that are the smaller, the nearer they are to the tensor's largest."""

from optgen.lang import amax, flag, hyper, normal, optimizer, state, where


@optimizer(cite="Bahrami & Pourjafari 2021, arXiv:2101.09192")
def gravity(
    p, g, t,
    v=state(),
    *,
    lr=hyper(0.01, ge=0),
    alpha=hyper(0.01, ge=0, doc="the first velocity's standard deviation, times lr"),
    beta=hyper(0.9, ge=0, le=1, doc="the largest decay of the velocity"),
    starts=flag(first=True),
):
    """The first velocity is drawn, with a standard deviation of alpha / lr; it is 0 where that lr is 0."""
    if starts:
        v = where(lr > 0, alpha, 0.0) / where(lr > 0, lr, 1.0) * normal(0)
    keep = (beta * t + 1) / (t + 2)
    ratio = g * amax(abs(g))
    v = keep * v + (1 - keep) * (g / (1 + ratio * ratio))
    p = p - lr * v
    return p, v
