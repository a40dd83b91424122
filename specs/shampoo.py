"""Shampoo with the size of Adam's step; AdamW for everything that is no matrix."""

from optgen.lang import (
    finite, flag, gram, hyper, inverse_root, mat_norm, matrix_state, maximum, nonneg, optimizer, policies, shape_flag,
    sqrt, state, symmetric, where,
)  # fmt: skip


@optimizer(cite="Gupta et al. 2018, arXiv:1802.09568, algorithm 2", name="Shampoo", matrix="heads")
def shampoo(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    left=matrix_state("rows", symmetric, when="matrix"),
    root_left=matrix_state("rows", symmetric, when="matrix", init="identity"),
    right=matrix_state("columns", symmetric, when="matrix"),
    root_right=matrix_state("columns", symmetric, when="matrix", init="identity"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1),
    shampoo_beta=hyper(0.99, ge=0, lt=1, doc="the decay of the factors"),
    eps=hyper(1e-8, gt=0),
    matrix_eps=hyper(1e-6, ge=0, doc="added to the factors, relative to their largest eigenvalue"),
    root_order=hyper(4.0, gt=0, doc="the root of each factor that divides"),
    weight_decay=hyper(0.01, ge=0),
    precondition_frequency=hyper(10, ge=1, whole=True, doc="steps between two refreshes of the factors or bases"),
    max_precond_dim=hyper(10000, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    refresh=flag(every="precondition_frequency"),
    matrix=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and max(shape[-2:]) <= max_precond_dim),
):
    """Shampoo with the size of Adam's step; AdamW for everything that is no matrix.

    A step is left^(-1/root_order) m right^(-1/root_order) with Adam's first moment m, times the norm of Adam's step
    over its own (grafting, as in Shi et al. 2023, arXiv:2309.06497).  Steps k, 2k ..., with k = precondition_frequency,
    take new roots; those before k are Adam's.  A root that is not finite is not taken.  matrix_eps is relative to the
    largest eigenvalue.  Matrices with a side of more than max_precond_dim take AdamW.
    """
    if not matrix:
        p, exp_avg, exp_avg_sq = policies.adamw_step(p, g, t, exp_avg, exp_avg_sq, lr, betas, eps, weight_decay)
        return p, exp_avg, exp_avg_sq, left, root_left, right, root_right
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    adam = exp_avg / (1 - beta1**t) / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)
    left = shampoo_beta * left + (1 - shampoo_beta) * gram(g)
    right = shampoo_beta * right + (1 - shampoo_beta) * gram(g.T)
    if refresh:
        root_left = finite(inverse_root(left, root_order, matrix_eps), root_left)
        root_right = finite(inverse_root(right, root_order, matrix_eps), root_right)
        left, right = finite(left), finite(right)
    update = root_left @ exp_avg @ root_right
    update = mat_norm(adam) / maximum(mat_norm(update), 1e-30) * update
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * where(t < precondition_frequency, adam, update)
    return p, exp_avg, exp_avg_sq, left, root_left, right, root_right
