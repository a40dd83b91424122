"""Adafactor as torch has it."""

from optgen.lang import (
    col,
    col_mean,
    hyper,
    mat_mean,
    maximum,
    minimum,
    nonneg,
    optimizer,
    rms,
    row,
    row_mean,
    rsqrt,
    shape_flag,
    state,
)  # fmt: skip
from optgen.lang.policies import decoupled


@optimizer(cite="Shazeer & Stern 2018, arXiv:1804.04235", like="torch.optim.Adafactor")
def adafactor(
    p, g, t,
    row_var=row(nonneg, when="factored"),
    col_var=col(nonneg, when="factored"),
    variance=state(nonneg, when="not factored"),
    *,
    lr=hyper(1e-2, ge=0, doc="the largest relative step"),
    beta2_decay=hyper(-0.8, le=0, doc="the power of t that 1 - beta2 falls by"),
    eps=hyper((2.0**-23, 1e-3), gt=0, doc="the least second moment's root, and the least size of a weight"),
    d=hyper(1.0, ge=1, doc="the root mean square that an update is clipped to"),
    weight_decay=hyper(0.0, ge=0),
    factored=shape_flag(lambda shape: len(shape) >= 2),
):
    """A second moment kept as its row and column means; the step is relative to the size of the weight.

    lr is the largest relative step: late ones are 1 / sqrt(t).  eps is that of fp32 where torch takes the weight's.
    """
    eps1, eps2 = eps
    one_minus_beta2 = t**beta2_decay
    alpha = maximum(rms(p), eps2) * minimum(lr, t**-0.5)
    p = decoupled(p, lr, weight_decay)
    if factored:
        row_var = (1 - one_minus_beta2) * row_var + one_minus_beta2 * row_mean(g * g)
        col_var = (1 - one_minus_beta2) * col_var + one_minus_beta2 * col_mean(g * g)
        inverse = minimum(rsqrt(row_var / maximum(mat_mean(row_var), eps1)) * rsqrt(col_var), 1 / eps1)
    else:
        variance = (1 - one_minus_beta2) * variance + one_minus_beta2 * (g * g)
        inverse = rsqrt(maximum(variance, eps1 * eps1))
    update = g * inverse
    p = p - alpha / maximum(1.0, rms(update) / d) * update
    return p, row_var, col_var, variance
