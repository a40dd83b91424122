"""SOAP: AdamW in the eigenbasis of Shampoo's factors; AdamW for everything that is no matrix."""

from optgen.lang import (
    capped, column_norms, flag, gram, hyper, matrix_state, maximum, nonneg, optimizer, orthogonal, policies, shape_flag,
    sqrt, state, symmetric, where,
)  # fmt: skip


def carried(order, turn, root):
    """The matrix that second moments are multiplied by at a change of bases: `order`, or for a direction that would
    have far too little by it, the squares of `turn`.

    Noise of few bits lets directions without gradients change places in one of the two alone.  First moments would
    then be divided by the roots of another direction's second moments, which may be 0.

    root  of the second moments, directions in its columns; of what is transposed, so that a worker's matrix stays there
    """
    size = column_norms(order, root).T  # of a direction, in each place of its row
    return where(8 * column_norms(order, size * order) < column_norms(order, size * turn), turn * turn, order)


@optimizer(cite="Vyas et al. 2024, arXiv:2409.11321, algorithm 3", name="SOAP", matrix="heads")
def soap(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    left=matrix_state("rows", symmetric, when="by_rows"),
    basis_left=matrix_state("rows", orthogonal, when="by_rows", init="identity"),
    right=matrix_state("columns", symmetric, when="by_columns"),
    basis_right=matrix_state("columns", orthogonal, when="by_columns", init="identity"),
    *,
    lr=hyper(3e-3, ge=0),
    betas=hyper((0.95, 0.95), ge=0, lt=1),
    shampoo_beta=hyper(0.95, ge=0, lt=1, doc="the decay of the factors"),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.01, ge=0),
    precondition_frequency=hyper(10, ge=1, whole=True, doc="steps between two refreshes of the factors or bases"),
    max_precond_dim=hyper(10000, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    refresh=flag(every="precondition_frequency", first=True),
    by_rows=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and shape[-2] <= max_precond_dim),
    by_columns=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and shape[-1] <= max_precond_dim),
):
    """SOAP: AdamW in the eigenbasis of Shampoo's factors; AdamW for everything that is no matrix.

    The first step of a parameter makes its bases and does not move it, as in the authors' code.  Steps k + 1,
    2k + 1 ..., with k = precondition_frequency, bring them nearer to the eigenvectors.  Second moments change places
    with the directions, as in the authors' code; a direction that has less than a 64th of what the change of bases
    brings takes that.  A side of more than max_precond_dim has no basis.  All states are kept in the bases, where few
    bits cost least.  Elements of gradients count as 1e14 at most, so that fp32 has their squares' sums.
    """
    if not (by_rows or by_columns):
        p, exp_avg, exp_avg_sq = policies.adamw_step(p, g, t, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay)
        return p, exp_avg, exp_avg_sq, left, basis_left, right, basis_right
    beta1, beta2 = betas
    moves = where(t > 1, 1.0, 0.0)
    k = maximum(t - 1, 1)
    g = capped(g, 1e14)
    turned = basis_left.T @ g if by_rows else g
    turned = turned @ basis_right if by_columns else turned
    exp_avg = beta1 * exp_avg + (1 - beta1) * moves * turned
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * moves * turned * turned
    update = exp_avg / (sqrt(exp_avg_sq) + eps)
    update = basis_left @ update if by_rows else update
    update = update @ basis_right.T if by_columns else update
    p = p - moves * lr * sqrt(1 - beta2**k) / (1 - beta1**k) * update
    p = policies.decoupled(p, moves * lr, weight_decay)
    if by_rows:
        left = shampoo_beta * left + (1 - shampoo_beta) * gram(turned)
    if by_columns:
        right = shampoo_beta * right + (1 - shampoo_beta) * gram(turned.T)
    if refresh and by_rows:
        order, turn, left, basis_left = policies.renewed(left, basis_left, known=t > 1)
        exp_avg, exp_avg_sq = turn.T @ exp_avg, carried(order, turn, sqrt(exp_avg_sq.T)).T @ exp_avg_sq
    if refresh and by_columns:
        order, turn, right, basis_right = policies.renewed(right, basis_right, known=t > 1)
        exp_avg, exp_avg_sq = exp_avg @ turn, exp_avg_sq @ carried(order, turn, sqrt(exp_avg_sq.T).T)
    return p, exp_avg, exp_avg_sq, left, basis_left, right, basis_right
