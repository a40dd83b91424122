"""SinkGD: the gradient with rows and columns of one size, without a state; Adam for vectors."""

from optgen.lang import (
    col_mean, flag, hyper, maximum, nonneg, optimizer, policies, row_mean, shape_flag, sqrt, state,
)  # fmt: skip

ROUNDS = 5


@optimizer(cite="Scetbon et al. 2025, arXiv:2502.06742, algorithms 3 and 4", name="SinkGD", matrix="heads")
def sinkgd(
    p, g, t,
    exp_avg=state(when="not matrix or adamw"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    *,
    lr=hyper(0.02, ge=0, doc="the learning rate"),
    scale=hyper(0.05, ge=0, doc="a factor of steps of matrices"),
    weight_decay=hyper(0.0, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the betas of parameters that AdamW steps"),
    eps=hyper(1e-8, gt=0),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """SinkGD: the gradient with rows and columns of one size, without a state; Adam for vectors.

    Five times the rows of a gradient, and then its columns, are divided by their root mean squares (at least 1e-12).
    Groups with adamw=True (embeddings, the head) take AdamW, whose rate lr is; steps of matrices have lr * scale.
    `blocks` is that of Muon.
    """
    if adamw or not matrix:
        p, exp_avg, exp_avg_sq = policies.adamw_step(p, g, t, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay)
        return p, exp_avg, exp_avg_sq
    down = 1.0  # factors of columns; those of rows do not depend on those of the round before
    for _ in range(ROUNDS):
        across = 1 / maximum(sqrt(row_mean((g * down) ** 2)), 1e-12)
        down = 1 / maximum(sqrt(col_mean((g * across) ** 2)), 1e-12)
    even = g * across * down
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * scale * even
    return p, exp_avg, exp_avg_sq
