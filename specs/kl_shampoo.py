"""KL-Shampoo: Shampoo whose two factors are estimated by one another's inverse; AdamW for what is no matrix."""

from optgen.lang import (
    capped, col, col_mean, finite, flag, gram, hyper, identity, matrix_state, maximum, minimum, nonneg, optimizer,
    orthogonal, orthogonal_iteration, policies, row, row_mean, rsqrt, shape_flag, state, symmetric, where,
)  # fmt: skip


@optimizer(cite="Lin et al. 2025, arXiv:2509.03378, as the authors' code has it", name="KLShampoo", matrix="heads")
def kl_shampoo(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg, when="not matrix"),
    left=matrix_state("rows", symmetric, when="matrix"),
    basis_left=matrix_state("rows", orthogonal, when="matrix", init="identity"),
    eigen_left=row(nonneg, when="matrix", init="init_factor"),
    right=matrix_state("columns", symmetric, when="matrix"),
    basis_right=matrix_state("columns", orthogonal, when="matrix", init="identity"),
    eigen_right=col(nonneg, when="matrix", init="init_factor"),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper(
        (0.9, 0.98), ge=0, lt=1,
        doc="the decays of the gradient's average, and of the factors (of squares, under AdamW)",
    ),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.01, ge=0),
    precondition_frequency=hyper(10, ge=1, whole=True, doc="steps between two refreshes of the factors or bases"),
    max_precond_dim=hyper(10000, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    init_factor=hyper(0.1, gt=0, doc="the first eigenvalues"),
    max_clamp_value=hyper(4000.0, gt=0, doc="the largest factor by which a direction is scaled"),
    refresh=flag(every="precondition_frequency", first=True),
    matrix=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and max(shape[-2:]) <= max_precond_dim),
):
    """KL-Shampoo: Shampoo whose two factors are estimated by one another's inverse; AdamW for what is no matrix.

    A step is left^(-1/2) m right^(-1/2) with the momentum m.  The first step of a parameter makes its bases and does
    not move it, as in the authors' code.  Steps k + 1, 2k + 1 ..., with k = precondition_frequency, bring them nearer
    to the eigenvectors; eigenvalues are averages of their own, renewed in each step.  Matrices with a side of more than
    max_precond_dim take AdamW.  The momentum and both factors are kept in the bases, where few bits cost least.
    Elements of gradients count as 1e11 at most, so that fp32 has the sums of squares of their products with
    max_clamp_value.  A step divides by the eigenvalues from before its gradient, as the authors' code does, so that one
    gradient k times as large as those before makes a step (1 - betas[0]) k times as large: clip gradients.
    """
    if not matrix:
        p, exp_avg, exp_avg_sq = policies.adamw_step(p, g, t, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay)
        return p, exp_avg, exp_avg_sq, left, basis_left, eigen_left, right, basis_right, eigen_right
    beta1, beta2 = betas
    moves, first = where(t > 1, 1.0, 0.0), maximum(init_factor, 1 / (max_clamp_value * max_clamp_value))
    gain = (1 - beta2) * where(t > 1, 1.0, first)  # factors begin with the gradient's own products
    g = basis_left.T @ capped(g, 1e11) @ basis_right
    down = minimum(rsqrt(eigen_left), max_clamp_value)
    across = minimum(rsqrt(eigen_right), max_clamp_value)
    exp_avg = beta1 * exp_avg + (1 - beta1) * moves * g
    update = exp_avg * (down * across) / (1 + eps * (down * across))
    p = p - moves * lr * (basis_left @ update @ basis_right.T)
    p = policies.decoupled(p, moves * lr, weight_decay)
    by_left, by_right = g * down, g * across
    left = beta2 * left + gain * gram(by_right)  # times the columns, which the eigenvectors do not depend on
    right = beta2 * right + gain * gram(by_left.T)
    eigen_left = eigen_left + (1 - beta2) * moves * (row_mean(by_right * by_right) - eigen_left)
    eigen_right = eigen_right + (1 - beta2) * moves * (col_mean(by_left * by_left) - eigen_right)
    if refresh:
        left, right = finite(left), finite(right)  # zeros turn nothing
        turn = finite(orthogonal_iteration(left, identity(left), known=t > 1), identity(left))
        across = finite(orthogonal_iteration(right, identity(right), known=t > 1), identity(right))
        exp_avg = turn.T @ exp_avg @ across
        left, basis_left = policies.rotated(left, basis_left, turn)
        right, basis_right = policies.rotated(right, basis_right, across)
    return p, exp_avg, exp_avg_sq, left, basis_left, eigen_left, right, basis_right, eigen_right
