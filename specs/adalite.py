"""Adalite: a second moment of sums of rows and columns, and a momentum of rank one."""

from optgen.lang import (
    col, col_mean, col_sum, exp, flag, hyper, mat_max, maximum, nonneg, norm, optimizer, row, row_mean, row_sum,
    shape_flag, sqrt, state, tensor_state, total,
)  # fmt: skip
from optgen.lang.policies import decoupled, l2


def softmax(x):
    """The softmax of the values of rows or columns, to be divided by its sum."""
    return exp(x - mat_max(x))


@optimizer(cite="github.com/VatsaDev/adalite, as pytorch_optimizer has it", matrix="first")
def adalite(
    p, g, t,
    m_avg=state(when="not matrix"),
    v_avg=state(nonneg, when="not matrix"),
    v_rows=row(nonneg, when="matrix"),
    v_columns=col(nonneg, when="matrix"),
    m_rows=row(when="matrix"),
    m_columns=col(when="matrix"),
    m_scale=tensor_state(when="matrix"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    weight_decay=hyper(1e-2, ge=0),
    g_norm_min=hyper(1e-10, gt=0),
    ratio_min=hyper(1e-4, ge=0),
    tau=hyper(1.0, gt=0),
    eps1=hyper(1e-6, gt=0),
    eps2=hyper(1e-10, gt=0),
    weight_decouple=flag(True),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
    several=shape_flag(lambda shape: sum(shape) > 1),
):
    """Gradients have the length of the weight.  The momentum is the product of two vectors, found by softmax weights."""
    beta1, beta2 = betas
    if not weight_decouple:
        g = l2(g, p, weight_decay)
    if several:
        g = maximum(norm(p) / maximum(norm(g), g_norm_min), ratio_min) * g
    m = m_rows * m_columns * m_scale if matrix else m_avg
    v = v_rows * v_columns / maximum(total(v_rows), eps2) if matrix else v_avg
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * (g - m) ** 2
    if matrix:
        row_means, column_means = row_mean(v), col_mean(v)
        by_row, by_column = softmax(row_means), softmax(column_means)
        share = by_row * by_column / (total(by_row) * total(by_column))
        m = m + (1 - share) * (g - m)
    u = (m + (1 - beta1) * (g - m)) / sqrt(v / (1 - beta2**t) + eps1)
    if matrix:
        v_rows = row_sum(v)
        v_columns = col_sum(v) / maximum(total(v_rows), eps2)
        by_row, by_column = softmax(row_means / tau), softmax(column_means / tau)
        m_rows = row_sum(m * (by_column / total(by_column)))
        m_columns = col_sum(m * (by_row / total(by_row)))
        squares = total(m_rows * m_rows) * total(m_columns * m_columns)
        m_scale = total(m_rows * m * m_columns) / maximum(squares, eps2)
    else:
        m_avg, v_avg = m, v
    if weight_decouple:
        p = decoupled(p, lr, weight_decay)
    p = p - lr * u
    return p, m_avg, v_avg, v_rows, v_columns, m_rows, m_columns, m_scale
