"""SM3: Adagrad that keeps one number per row and per column."""

from optgen.lang import (
    col,
    col_max,
    flag,
    hyper,
    minimum,
    nonneg,
    optimizer,
    row,
    row_max,
    rsqrt,
    shape_flag,
    state,
)  # fmt: skip


@optimizer(cite="Anil et al. 2019, arXiv:1901.11150, algorithm SM3-II", name="SM3")
def sm3(
    p, g,
    accumulator=state(nonneg, when="not factored"),
    accumulator_row=row(nonneg, when="factored"),
    accumulator_col=col(nonneg, when="factored"),
    momentum_buffer=state(when="has_momentum"),
    *,
    lr=hyper(0.1, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum; 0 keeps none"),
    eps=hyper(1e-30, gt=0, doc="added under the root that divides"),
    has_momentum=flag(nonzero="momentum"),
    factored=shape_flag(lambda shape: len(shape) >= 2),
):
    """Each sum of squares is the smaller of its row's and its column's largest one, plus the new square.

    Rows and columns are those of the last two dimensions, in each matrix of a tensor that has more.
    """
    if factored:
        total = minimum(accumulator_row, accumulator_col) + g * g
        accumulator_row = row_max(total)
        accumulator_col = col_max(total)
    else:
        accumulator = accumulator + g * g
        total = accumulator
    update = g * rsqrt(total + eps)
    if has_momentum:
        momentum_buffer = momentum * momentum_buffer + (1 - momentum) * update
        update = momentum_buffer
    p = p - lr * update
    return p, accumulator, accumulator_row, accumulator_col, momentum_buffer
