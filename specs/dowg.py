"""DoWG: SGD whose rate is the square of the distance gone over the root of gradients weighted by it."""

from optgen.lang import hyper, maximum, model_norm, model_state, model_total, nonneg, optimizer, sqrt, state
from optgen.lang.policies import l2


@optimizer(cite="Khaled et al. 2023, arXiv:2305.16284, algorithm 1", name="DoWG")
def dowg(
    p, g,
    p0=state(init="param"),
    rbar=model_state(nonneg, init="reps"),
    squares=model_state(nonneg),
    *,
    lr=hyper(1.0, ge=0, doc="a factor of the estimated rate; usual: 1"),
    reps=hyper(1e-4, gt=0, doc="the least distance"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """The distance is the largest of the model from its first weights, and at least reps."""
    g = l2(g, p, weight_decay)
    rbar = maximum(rbar, model_norm(p - p0))
    squares = squares + rbar * rbar * model_total(g * g)
    p = p - lr * (rbar * rbar) / (sqrt(squares) + eps) * g
    return p, p0, rbar, squares
