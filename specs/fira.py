"""Fira: GaLore, and beside it what the gradient has outside of the space, scaled as Adam scales inside."""

from optgen.lang import (
    column_norms, finite, flag, hyper, low_rank_state, maximum, nonneg, norm, optimizer, orthogonal, shape_flag,
    singular_vectors, sqrt, state, tensor_state, unwide, where, wide,
)  # fmt: skip


@optimizer(cite="Chen et al. 2024, arXiv:2410.01623, as the authors' code has it", matrix="heads")
def fira(
    p, g, t,
    exp_avg=state(when="not matrix or adamw"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    projector=low_rank_state("short", orthogonal, rank="rank", when="matrix and not adamw"),
    low_avg=low_rank_state("long", rank="rank", when="matrix and not adamw", normalized_by="low_avg_sq"),
    low_avg_sq=low_rank_state("long", nonneg, rank="rank", when="matrix and not adamw"),
    scaling_grad=tensor_state(nonneg, when="matrix and not adamw"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(0.0, ge=0),
    rank=hyper(128, ge=1, whole=True, doc="the rank of the space that Adam's states live in"),
    update_proj_gap=hyper(200, ge=1, whole=True, doc="steps between two spaces"),
    alpha=hyper(0.25, ge=0, doc="a factor of steps in the space"),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
    renews=flag(first=True, every="update_proj_gap"),
):
    """Fira: GaLore, and beside it what the gradient has outside of the space, scaled as Adam scales inside.

    The norm of that part grows by 1 % a step at most, but freely from 0: a first gradient that is tiny but not 0, such
    as 1e-12, keeps it below 0.01 for 900 steps.  Of a stack it is that of all its matrices.
    Spaces and signs are those of GaLore.  Groups with adamw=True (embeddings, the head) and vectors have AdamW, of the
    same lr.
    """
    beta1, beta2 = betas
    step_size = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
    if adamw or not matrix:
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        u = exp_avg / (sqrt(exp_avg_sq) + eps)
    else:
        full = wide(g)
        if renews:
            projector = finite(singular_vectors(projector, full), projector)
        low = projector.T @ full
        low_avg = beta1 * low_avg + (1 - beta1) * low
        low_avg_sq = beta2 * low_avg_sq + (1 - beta2) * low * low
        adam = low_avg / (sqrt(low_avg_sq) + eps)
        ratio = column_norms(full, adam) / (column_norms(full, low) + 1e-8)
        rest = unwide(g, (full - alpha * (projector @ low)) * ratio)
        size = norm(rest)
        limit = where(scaling_grad > 0, maximum(size / (scaling_grad + 1e-8), 1.01) / 1.01, 1.0)
        scaling_grad = size / limit
        u = alpha * unwide(g, projector @ adam) + rest / limit
    p = p - step_size * u
    p = p * (1 - lr * weight_decay)
    return p, exp_avg, exp_avg_sq, projector, low_avg, low_avg_sq, scaling_grad
