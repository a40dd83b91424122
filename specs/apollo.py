"""APOLLO: the gradient itself, scaled by what Adam would do in a random space of low rank."""

from optgen.lang import (
    column_norms, flag, floor, hyper, low_rank_state, mat_norm, maximum, nonneg, norm, normal, optimizer, shape_flag,
    sqrt, state, tensor_state, unwide, where, wide, zero_product,
)  # fmt: skip


@optimizer(cite="Zhu et al. 2024, arXiv:2412.05270, as apollo-torch has it", name="APOLLO", matrix="heads")
def apollo(
    p, g, t,
    exp_avg=state(when="not matrix or adamw"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    low_avg=low_rank_state("long", rank="rank", when="matrix and not adamw", normalized_by="low_avg_sq"),
    low_avg_sq=low_rank_state("long", nonneg, rank="rank", when="matrix and not adamw"),
    scaled_grad=tensor_state(nonneg, when="matrix and not adamw"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(0.0, ge=0),
    rank=hyper(256, ge=1, whole=True, doc="the rank of the space that Adam's states live in"),
    update_proj_gap=hyper(200, ge=1, whole=True, doc="steps between two spaces"),
    scale=hyper(1.0, ge=0, doc="the scale of the step, squared: 128 for APOLLO-Mini"),
    per_tensor=flag(False, doc="one scale per matrix, not one per column: APOLLO-Mini"),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """APOLLO: the gradient itself, scaled by what Adam would do in a random space of low rank.

    APOLLO-Mini is rank=1, scale=128, per_tensor=True: one scale for each matrix instead of one for each index of its
    longer side.  The norm of the step grows by 1 % a step at most, but freely from 0: a first gradient that is tiny but
    not 0, such as 1e-12, keeps it below 0.01 for 900 steps.  Of a stack it is that of all its matrices.  The random
    numbers depend on the name of the parameter and on the step alone, and are not kept.  Groups with adamw=True
    (embeddings, the head) and vectors have AdamW, of the same lr.
    """
    beta1, beta2 = betas
    step_size = lr * sqrt(1 - beta2**t) / (1 - beta1**t)
    if adamw or not matrix:
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        u = exp_avg / (sqrt(exp_avg_sq) + eps)
    else:
        full = wide(g)
        drawn = normal(zero_product(full, low_avg.T), floor((t - 1) / update_proj_gap))
        low = drawn.T @ full / sqrt(rank)
        low_avg = beta1 * low_avg + (1 - beta1) * low
        low_avg_sq = beta2 * low_avg_sq + (1 - beta2) * low * low
        adam = low_avg / (sqrt(low_avg_sq) + eps)
        if per_tensor:
            ratio = mat_norm(adam) / (mat_norm(low) + 1e-8)
        else:
            ratio = column_norms(full, adam) / (column_norms(full, low) + 1e-8)
        scaled = unwide(g, full * ratio)
        size = norm(scaled)
        limit = where(scaled_grad > 0, maximum(size / (scaled_grad + 1e-8), 1.01) / 1.01, 1.0)
        scaled_grad = size / limit
        u = sqrt(scale) * scaled / limit
    p = p - step_size * u
    p = p * (1 - lr * weight_decay)
    return p, exp_avg, exp_avg_sq, low_avg, low_avg_sq, scaled_grad
