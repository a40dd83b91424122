"""Dion: momentum made orthogonal in a space of low rank, with feedback of what is not in it; AdamW for the rest."""

from optgen.lang import (
    column_norms, columns, flag, hyper, low_rank_state, nonneg, normal, optimizer, orthogonal, policies, qr, rows,
    shape_flag, sqrt, state,
)  # fmt: skip


@optimizer(cite="Ahn et al. 2025, arXiv:2504.05295, algorithm 1, as the authors' dion_simple has it", matrix="heads")
def dion(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    q=low_rank_state("columns", orthogonal, rank="rank", when="matrix and not adamw"),  # nearly: rows of length 1
    *,
    lr=hyper(1e-2, ge=0),
    mu=hyper(0.95, ge=0, lt=1, doc="the part of the momentum's applied space that stays"),
    betas=hyper((0.9, 0.95), ge=0, lt=1, doc="the betas of parameters that AdamW steps"),
    weight_decay=hyper(0.01, ge=0),
    rank=hyper(768, ge=1, whole=True, doc="the rank of the step"),
    eps=hyper(1e-8, gt=0),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
    starts=flag(first=True),
):
    """Dion: momentum made orthogonal in a space of low rank, with feedback of what is not in it; AdamW for the rest.

    One power iteration a step, from normal random numbers at the first one, which depend on the parameter's name.  A
    rank above the sides of a matrix is the shorter one.  Groups with adamw=True (embeddings, the head) and vectors have
    AdamW, of the same lr.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, lr, betas, eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq, q
    if starts:
        q = normal(q, 0)
    full = momentum_buffer + g
    left = qr(full @ q.T)
    right = left.T @ full
    q = right / (column_norms(right.T, right.T).T + eps)
    momentum_buffer = full - (1 - mu) * (left @ right)
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * sqrt(rows(p) / columns(p)) * (left @ q)
    return p, momentum_buffer, exp_avg_sq, q
