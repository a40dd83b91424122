"""GaLore: Adam of the gradient in the space of its largest singular vectors, found anew every 200 steps."""

from optgen.lang import (
    finite, flag, hyper, low_rank_state, nonneg, optimizer, orthogonal, shape_flag, singular_vectors, sqrt, state,
    unwide, wide,
)  # fmt: skip


@optimizer(cite="Zhao et al. 2024, arXiv:2403.03507, as galore-torch has it", name="GaLore", matrix="heads")
def galore(
    p, g, t,
    exp_avg=state(when="not matrix or adamw"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    projector=low_rank_state("short", orthogonal, rank="rank", when="matrix and not adamw"),
    low_avg=low_rank_state("long", rank="rank", when="matrix and not adamw", normalized_by="low_avg_sq"),
    low_avg_sq=low_rank_state("long", nonneg, rank="rank", when="matrix and not adamw"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(0.0, ge=0),
    rank=hyper(128, ge=1, whole=True, doc="the rank of the space that Adam's states live in"),
    update_proj_gap=hyper(200, ge=1, whole=True, doc="steps between two spaces"),
    scale=hyper(0.25, ge=0, doc="a factor of steps in the space"),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
    renews=flag(first=True, every="update_proj_gap"),
):
    """GaLore: Adam of the gradient in the space of its largest singular vectors, found anew every 200 steps.

    The vectors are those of the shorter side of a matrix, which has at most `rank` of them; a rank above that side is
    that side.  The signs of the vectors, which authors leave to LAPACK, are fixed.  Groups with adamw=True (embeddings,
    the head) and vectors have AdamW, of the same lr.
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
        u = scale * unwide(g, projector @ (low_avg / (sqrt(low_avg_sq) + eps)))
    p = p - step_size * u
    p = p * (1 - lr * weight_decay)
    return p, exp_avg, exp_avg_sq, projector, low_avg, low_avg_sq
