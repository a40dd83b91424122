"""Nero: steps of one relative size for each neuron, whose weights have mean 0 and norm 1."""

from optgen.lang import (
    columns, equal, flag, hyper, maximum, mean, nonneg, optimizer, row, row_mean, row_sum, shape_flag, sqrt, state,
    tensor_state, where,
)  # fmt: skip


def centred(p):
    """The mean of each row, and its norm without it.

    Rows are nearly centred but at first, so that little cancels.
    """
    average = row_mean(p)
    return average, sqrt(maximum(row_sum(p * p) - columns(p) * average * average, 0.0))


@optimizer(cite="Liu et al. 2021, arXiv:2102.07227", matrix="first")
def nero(
    p, g, t,
    exp_avg_sq=row(nonneg, when="matrix"),
    square_avg=state(nonneg, when="not matrix"),
    scale=tensor_state(nonneg),
    *,
    lr=hyper(0.01, ge=0),
    beta=hyper(0.999, ge=0, lt=1, doc="the decay of the average square of a neuron"),
    eps=hyper(1e-8, gt=0),
    constraints=flag(True, doc="centre and normalize each row before the first step and after each"),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """The gradient over the root of a neuron's average square, times the mean norm of neurons at the start.

    With constraints each row is centred and divided by its norm before the first step and after each.  An element of a
    vector is a neuron, without constraints; where all are 0 the mean counts as .01.  Where lr is 0 weights stay, and
    the start is the first step at another lr.
    """
    start, begins = p, equal(scale, 0.0)
    if not matrix:
        square_avg = beta * square_avg + (1 - beta) * g * g
        length, norms = square_avg, abs(p)
    else:
        exp_avg_sq = beta * exp_avg_sq + (1 - beta) * row_sum(g * g)
        length = exp_avg_sq
        if constraints:
            average, size = centred(p)
            p, norms = where(begins, (p - average) / (size + eps), p), size / (size + eps)
        else:
            norms = sqrt(row_sum(p * p))
    typical = mean(norms)
    scale = where(lr > 0, where(begins, where(typical > 0, typical, 0.01), scale), scale)
    p = p - lr * scale * g / (sqrt(length / (1 - beta**t)) + eps)
    if constraints and matrix:
        average, size = centred(p)
        p = where(lr > 0, (p - average) / (size + eps), start)
    return p, exp_avg_sq, square_avg, scale
