"""Conda: Adam whose second moment is that of the gradient along the singular vectors of the momentum."""

from optgen.lang import (
    finite, flag, hyper, matrix_state, nonneg, optimizer, orthogonal, shape_flag, singular_vectors, sqrt, state, unwide,
    wide,
)  # fmt: skip


@optimizer(cite="Wang et al. 2025, arXiv:2509.24218, as the authors' code has it", matrix="heads")
def conda(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    basis=matrix_state("short", orthogonal, when="matrix and not adamw", init="identity"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    update_proj_gap=hyper(2000, ge=1, whole=True, doc="steps between two bases"),
    scale=hyper(0.25, ge=0, doc="a factor of steps of matrices"),
    adamw=flag(False),
    renews=flag(every="update_proj_gap", first=True),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """Conda: Adam whose second moment is that of the gradient along the singular vectors of the momentum.

    The vectors are those of the shorter side of a matrix, found anew every update_proj_gap steps.  Both moments are
    kept along them, where few bits cost least.  Groups with adamw=True (embeddings, the head) and vectors have AdamW,
    of the same lr.
    """
    beta1, beta2 = betas
    if not adamw and matrix:
        if renews:
            old = basis @ wide(exp_avg)
            basis = finite(singular_vectors(basis, beta1 * old + (1 - beta1) * wide(g)), basis)
            exp_avg = unwide(g, basis.T @ old)
        g = unwide(g, basis.T @ wide(g))
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    u = exp_avg / (sqrt(exp_avg_sq) + eps)
    if not adamw and matrix:
        u = scale * unwide(g, basis @ wide(u))
    p = p - lr * sqrt(1 - beta2**t) / (1 - beta1**t) * u
    p = p * (1 - lr * weight_decay)
    return p, exp_avg, exp_avg_sq, basis
