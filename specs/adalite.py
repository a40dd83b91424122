"""Adalite: a second moment of sums of rows and columns, and a momentum of rank one."""

from optgen.lang import (
    col, col_mean, col_sum, elements, exp, hyper, mat_max, maximum, nonneg, norm, optimizer, row, row_mean, row_sum,
    shape_flag, sqrt, state, tensor_state, total, where,
)  # fmt: skip
from optgen.lang.policies import decoupled


def softmax(x):
    """The softmax of the values of rows or columns."""
    y = exp(x - mat_max(x))
    return y / total(y)


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
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the averages of the gradient and of its squared distance from the first",
    ),
    weight_decay=hyper(1e-2, ge=0),
    g_norm_min=hyper(1e-10, gt=0, doc="the least norm of a gradient"),
    ratio_min=hyper(1e-4, ge=0, doc="the least ratio of the two norms"),
    eps1=hyper(1e-6, gt=0, doc="added under the root of the second moment"),
    eps2=hyper(1e-10, gt=0, doc="the least sum of second moments"),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """Gradients get the length of the weight, but for one of one element.

    The momentum is the product of two vectors, which are sums weighted by softmax of the second moment's means.
    """
    beta1, beta2 = betas
    ratio = maximum(norm(p) / maximum(norm(g), g_norm_min), ratio_min)
    g = (ratio if matrix else where(elements(g) > 1, ratio, 1.0)) * g
    m = m_rows * m_columns * m_scale if matrix else m_avg
    v = v_rows * v_columns / maximum(total(v_rows), eps2) if matrix else v_avg
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * (g - m) ** 2
    if matrix:
        by_row, by_column = softmax(row_mean(v)), softmax(col_mean(v))
        m = m + (1 - by_row * by_column) * (g - m)
    u = (m + (1 - beta1) * (g - m)) / sqrt(v / (1 - beta2**t) + eps1)
    if matrix:
        v_rows = row_sum(v)
        v_columns = col_sum(v) / maximum(total(v_rows), eps2)
        m_rows, m_columns = row_sum(m * by_column), col_sum(m * by_row)
        squares = total(m_rows * m_rows) * total(m_columns * m_columns)
        m_scale = total(m_rows * m * m_columns) / maximum(squares, eps2)
    else:
        m_avg, v_avg = m, v
    p = decoupled(p, lr, weight_decay)
    p = p - lr * u
    return p, m_avg, v_avg, v_rows, v_columns, m_rows, m_columns, m_scale
