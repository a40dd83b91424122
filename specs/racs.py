"""RACS: the gradient over roots of average squares of its row and of its column."""

from optgen.lang import (
    col, col_mean, hyper, maximum, mean, nonneg, norm, optimizer, row, row_mean, shape_flag, sqrt, state, tensor_state,
    where,
)  # fmt: skip
from optgen.lang.policies import decoupled


@optimizer(cite="Gong et al. 2025, arXiv:2502.07752", name="RACS", matrix="first")
def racs(
    p, g, t,
    s=row(nonneg, when="matrix"),
    q=col(nonneg, when="matrix", init=1.0),
    square_avg=state(nonneg, when="not matrix"),
    mean_avg=tensor_state(nonneg, when="not matrix", init=1.0),
    theta=tensor_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.9, ge=0, lt=1, doc="the decay of the average squares"),
    alpha=hyper(0.05, ge=0, doc="a factor of the step"),
    gamma=hyper(1.01, gt=0, doc="the factor by which a step's norm grows at most"),
    eps=hyper(1e-8, gt=0, doc="added under both roots that divide, and to the last step's norm"),
    weight_decay=hyper(0.0, ge=0),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """The norm of the scaled gradient grows by the factor gamma at most.  A vector is a matrix of one column."""
    p = decoupled(p, lr, weight_decay)
    square = g * g
    if matrix:
        s = beta * s + (1 - beta) * row_mean(square)
        q = beta * q + (1 - beta) * col_mean(square)
        scaled = g / (sqrt(s + eps) * sqrt(q + eps))
    else:
        square_avg = beta * square_avg + (1 - beta) * square
        mean_avg = beta * mean_avg + (1 - beta) * mean(square)
        scaled = g / (sqrt(square_avg + eps) * sqrt(mean_avg + eps))
    length = norm(scaled)
    limit = where(t > 1, gamma / maximum(length / (theta + eps), gamma), 1.0)
    theta = length * limit
    p = p - lr * alpha * limit * scaled
    return p, s, q, square_avg, mean_avg, theta
