"""Adafactor as its paper has it, with the options of transformers' implementation."""

from optgen.lang import (
    col,
    col_mean,
    flag,
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


@optimizer(cite="Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5")
def adafactor_paper(
    p, g, t,
    exp_avg=state(when="has_momentum"),
    exp_avg_sq=state(nonneg, when="not factored"),
    exp_avg_sq_row=row(nonneg, when="factored"),
    exp_avg_sq_col=col(nonneg, when="factored"),
    *,
    lr=hyper(1e-2, ge=0, doc="the learning rate, or the largest one by relative_step"),
    eps=hyper((1e-30, 1e-3), gt=0, doc="added to squares, and the least size of a weight"),
    clip_threshold=hyper(1.0, gt=0, doc="the root mean square that an update is clipped to"),
    decay_rate=hyper(-0.8, le=0, doc="the power of t that 1 - beta2 falls by"),
    beta1=hyper(0.0, ge=0, lt=1, doc="the decay of the average of steps; 0 keeps none"),
    weight_decay=hyper(0.0, ge=0),
    scale_parameter=flag(True, doc="steps are relative to the weight's root mean square"),
    relative_step=flag(True, doc="lr is the largest step; later ones are 1 / sqrt(t)"),
    has_momentum=flag(nonzero="beta1"),
    factored=shape_flag(lambda shape: len(shape) >= 2),
):
    """Adafactor; with relative_step lr is the largest step, later ones are 1 / sqrt(t).

    With scale_parameter steps are relative to the weight's root mean square.  Momentum averages the scaled steps.
    """
    eps1, eps2 = eps
    rate = minimum(lr, t**-0.5) if relative_step else lr
    if scale_parameter:
        rate = rate * maximum(eps2, rms(p))
    beta2 = 1 - t**decay_rate
    square = g * g + eps1
    if factored:
        exp_avg_sq_row = beta2 * exp_avg_sq_row + (1 - beta2) * row_mean(square)
        exp_avg_sq_col = beta2 * exp_avg_sq_col + (1 - beta2) * col_mean(square)
        update = g * rsqrt(exp_avg_sq_row / mat_mean(exp_avg_sq_row)) * rsqrt(exp_avg_sq_col)
    else:
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * square
        update = g * rsqrt(exp_avg_sq)
    update = rate / maximum(1.0, rms(update) / clip_threshold) * update
    if has_momentum:
        exp_avg = beta1 * exp_avg + (1 - beta1) * update
        update = exp_avg
    p = p - rate * weight_decay * p - update
    return p, exp_avg, exp_avg_sq, exp_avg_sq_row, exp_avg_sq_col
