"""NorMuon: Muon whose orthogonal step is evened out over the rows; AdamW for everything that is no matrix."""

from optgen.lang import (
    columns, flag, hyper, mat_norm, maximum, newton_schulz, nonneg, optimizer, policies, row, row_mean, rows,
    shape_flag, sqrt, state,
)  # fmt: skip


@optimizer(cite="Li et al. 2025, arXiv:2510.05491, algorithm 1", name="NorMuon", matrix="heads")
def normuon(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    row_sq=row(nonneg, when="matrix and not adamw"),
    *,
    lr=hyper(1e-3, ge=0, doc="the learning rate of matrices"),
    weight_decay=hyper(0.1, ge=0),
    betas=hyper((0.95, 0.95), ge=0, lt=1, doc="the decays of the momentum and of the rows' average square"),
    eps=hyper(1e-8, gt=0),
    ns_coefficients=hyper((3.4445, -4.7750, 2.0315), series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """NorMuon: Muon whose orthogonal step is evened out over the rows; AdamW for everything that is no matrix.

    Each matrix of a stack [experts, rows, columns] is one of its own, and convolutions are matrices of their output
    channels: `blocks` says which of the two, and how many heads a matrix has.  Groups with adamw=True (embeddings, the
    head) take AdamW whatever their shape.  Rates (lr, adamw_lr) and ns_coefficients are those of Muon.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq, row_sq
    beta1, beta2 = betas
    momentum_buffer = beta1 * momentum_buffer + (1 - beta1) * g
    direction = newton_schulz(momentum_buffer, ns_steps, ns_coefficients)
    row_sq = beta2 * row_sq + (1 - beta2) * row_mean(direction * direction)
    even = direction / (sqrt(row_sq) + eps)
    size = 0.2 * sqrt(rows(p) * columns(p)) / maximum(mat_norm(even), eps)
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * size * even
    return p, momentum_buffer, exp_avg_sq, row_sq
