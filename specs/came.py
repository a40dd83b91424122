"""CAME: Adafactor's factored second moment, and a second factored one that says how far to trust the update."""

from optgen.lang import (
    col, col_mean, hyper, mat_mean, maximum, nonneg, optimizer, policies, rms, row, row_mean, rsqrt, shape_flag,
    state,
)  # fmt: skip


@optimizer(cite="Luo et al. 2023, arXiv:2307.02047, algorithm 2", name="CAME")
def came(
    p, g,
    exp_avg=state(),
    exp_avg_sq=state(nonneg, when="not factored"),
    exp_avg_sq_row=row(nonneg, when="factored"),
    exp_avg_sq_col=col(nonneg, when="factored"),
    exp_avg_res_row=row(nonneg, when="factored"),
    exp_avg_res_col=col(nonneg, when="factored"),
    *,
    lr=hyper(2e-4, ge=0),
    eps=hyper((1e-30, 1e-16), gt=0, doc="added to squares, and to squared distances"),
    clip_threshold=hyper(1.0, gt=0, doc="the root mean square that an update is clipped to"),
    betas=hyper(
        (0.9, 0.999, 0.9999), ge=0, lt=1,
        doc="the decays of the averages of updates, of squares, and of squared distances between the two",
    ),
    weight_decay=hyper(0.0, ge=0),
    factored=shape_flag(lambda shape: len(shape) >= 2),
):
    beta1, beta2, beta3 = betas
    eps1, eps2 = eps
    square = g * g + eps1
    if factored:
        exp_avg_sq_row = beta2 * exp_avg_sq_row + (1 - beta2) * row_mean(square)
        exp_avg_sq_col = beta2 * exp_avg_sq_col + (1 - beta2) * col_mean(square)
        update = g * rsqrt(exp_avg_sq_row / mat_mean(exp_avg_sq_row)) * rsqrt(exp_avg_sq_col)
    else:
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * square
        update = g * rsqrt(exp_avg_sq)
    update = update / maximum(1.0, rms(update) / clip_threshold)
    exp_avg = beta1 * exp_avg + (1 - beta1) * update
    if factored:
        residual = (update - exp_avg) ** 2 + eps2
        exp_avg_res_row = beta3 * exp_avg_res_row + (1 - beta3) * row_mean(residual)
        exp_avg_res_col = beta3 * exp_avg_res_col + (1 - beta3) * col_mean(residual)
        step = exp_avg * rsqrt(exp_avg_res_row / mat_mean(exp_avg_res_row)) * rsqrt(exp_avg_res_col)
    else:
        step = exp_avg
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * step
    return p, exp_avg, exp_avg_sq, exp_avg_sq_row, exp_avg_sq_col, exp_avg_res_row, exp_avg_res_col
