"""SPlus: the sign of the momentum in the eigenbasis of Shampoo's factors, and an average of weights to evaluate."""

from optgen.lang import (
    columns, eigenvectors, finite, flag, gram, hyper, identity, matrix_state, optimizer, orthogonal, policies,
    rows, shape_flag, sign, state, symmetric,
)  # fmt: skip


def average(p, ema):
    """The average of all weights so far, which counts recent ones most."""
    return ema


@optimizer(cite="Frans et al. 2025, arXiv:2506.07254", name="SPlus", matrix="heads", evaluate=average)
def splus(
    p, g, t,
    momentum=state(),
    ema=state(init="param"),
    left=matrix_state("rows", symmetric, when="matrix"),
    basis_left=matrix_state("rows", orthogonal, when="matrix", init="identity"),
    right=matrix_state("columns", symmetric, when="matrix"),
    basis_right=matrix_state("columns", orthogonal, when="matrix", init="identity"),
    *,
    lr=hyper(0.1, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of the gradient and of the factors"),
    ema_rate=hyper(0.999, ge=0, lt=1, doc="the decay of the average of weights for evaluation"),
    weight_decay=hyper(0.01, ge=0),
    nonstandard_constant=hyper(0.001, ge=0, doc="a factor of lr for what is no matrix"),
    inverse_every=hyper(100, ge=1, whole=True, doc="steps between two bases"),
    max_precond_dim=hyper(10000, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    refresh=flag(every="inverse_every", first=True),
    matrix=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and max(shape[-2:]) <= max_precond_dim),
):
    """SPlus: the sign of the momentum in the eigenbasis of Shampoo's factors, and an average of weights to evaluate.

    A matrix of m rows and n columns moves by lr * 2 / (m + n), all else, such as vectors and matrices with a side of
    more than max_precond_dim, by lr * nonstandard_constant.  Steps 1, k + 1, 2k + 1 ..., with k = inverse_every, take
    new bases for the steps after them.  The momentum and both factors are kept in the bases, where few bits cost least.
    """
    beta1, beta2 = betas
    if matrix:
        g = basis_left.T @ g @ basis_right
    momentum = beta1 * momentum + (1 - beta1) * g
    update, rate = sign(momentum), lr * nonstandard_constant
    if matrix:
        update, rate = basis_left @ update @ basis_right.T, lr * 2 / (rows(p) + columns(p))
    p = p - rate * update
    ema = ema + (1 - ema_rate) / (1 - ema_rate**t) * (p - ema)
    p = policies.decoupled(p, rate, weight_decay)
    if matrix:
        left = beta2 * left + (1 - beta2) * gram(g)
        right = beta2 * right + (1 - beta2) * gram(g.T)
    if matrix and refresh:
        left, right = finite(left), finite(right)
        turn = finite(eigenvectors(left), identity(left))
        across = finite(eigenvectors(right), identity(right))
        momentum = turn.T @ momentum @ across
        left, basis_left = policies.rotated(left, basis_left, turn)
        right, basis_right = policies.rotated(right, basis_right, across)
    return p, momentum, ema, left, basis_left, right, basis_right
