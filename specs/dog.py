"""DoG: SGD whose rate is the distance gone over the root of all gradients' squares."""

from optgen.lang import hyper, maximum, model_norm, model_state, model_total, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import l2


@optimizer(cite="Ivgi et al. 2023, arXiv:2302.12022", name="DoG")
def dog(
    p, g, t,
    p0=state(init="param"),
    rbar=model_state(nonneg),
    squares=model_state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    reps_rel=hyper(1e-6, gt=0, doc="the first distance, relative to 1 + the norm of the weights"),
    eps=hyper(1e-8, gt=0, doc="the first term of the sum of squares"),
    weight_decay=hyper(0.0, ge=0),
):
    """The distance is the largest of the model from its first weights, and reps_rel * (1 + their norm) at first."""
    g = l2(g, p, weight_decay)
    distance = model_norm(where(t > 1, p - p0, p))
    rbar = maximum(rbar, where(t > 1, distance, reps_rel * (1 + distance)))
    squares = squares + model_total(g * g) + where(t > 1, 0.0, eps)
    p = p - lr * rbar / sqrt(squares) * g
    return p, p0, rbar, squares
