"""PSGD Kron: gradients whitened by a Kronecker product of two triangular factors, or by a diagonal of a vector."""

from optgen.lang import (
    amax, column_norms, columns, finite, flag, gram, hyper, low_rank_state, mat_max, mat_norm, matrix_state, maximum,
    minimum, nonneg, norm_lower_bound, normal, optimizer, policies, rms, rows, shape_flag, solve_triangular, sqrt,
    state, triangle, triangular, unwide, where, wide,
)  # fmt: skip

EPS = 1e-16  # without gradients factors grow by 1 + lr_precond a step, until their product is 1e8


def whitened(q, a, b, rate):
    """A triangular factor, nearer to a a' = b b' (Li 2018, arXiv:1803.09383)."""
    aa, bb = gram(a), gram(b)
    return q - rate * triangle(aa - bb) @ q / (norm_lower_bound(aa + bb) + EPS)


def balanced(q, other):
    """Both factors with the same largest magnitude; their product stays."""
    size, across = mat_max(abs(q)), mat_max(abs(other))
    return sqrt(across / size) * q, sqrt(size / across) * other


@optimizer(cite="Li 2015, arXiv:1512.04202, as kron_torch has it", name="Kron", matrix="heads")
def psgd_kron(
    p, g, t,
    momentum_buffer=state(),
    diagonal=state(nonneg, when="not matrix", init=1.0),
    left=matrix_state("rows", triangular, when="matrix and not oblong", init="identity"),
    right=matrix_state("columns", triangular, when="matrix and not oblong", init="identity"),
    short=matrix_state("short", triangular, when="oblong", init="identity"),
    long=low_rank_state("long", rank=1, when="oblong"),
    *,
    lr=hyper(3e-4, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the average of the gradient, whose bias is corrected"),
    weight_decay=hyper(0.0, ge=0),
    lr_precond=hyper(0.1, ge=0, lt=1, doc="the learning rate of the factors"),
    precondition_frequency=hyper(1, ge=1, whole=True, doc="steps between two refreshes of the factors or bases"),
    max_precond_dim=hyper(8192, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    refresh=flag(every="precondition_frequency"),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
    oblong=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and max(shape[-2:]) > max_precond_dim),
):
    """PSGD Kron: gradients whitened by a Kronecker product of two triangular factors, or by a diagonal of a vector.

    The factors take a step towards those that make the momentum as large as random numbers are, every
    `precondition_frequency` steps.  The authors do so in all of the first 500 steps and ever more seldom until step
    4000, then in one of 33: set it in the groups.  A longer side of more than max_precond_dim has a diagonal factor;
    the random numbers of vectors are averaged out.  Vectors have no weight decay.  Elements of gradients count as 1e10
    at most.  Factors that are not finite are not taken.
    """
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g * minimum(1e10 / abs(g), 1)
    m = momentum_buffer / (1 - momentum**t)
    if not matrix:
        if refresh:
            aa, bb = diagonal * diagonal * m * m, 1 / (diagonal * diagonal + EPS)
            new = diagonal - lr_precond * (aa - bb) * diagonal / (amax(aa + bb) + EPS)
            diagonal = where(new < 1e38, new, diagonal)
        u = diagonal * diagonal * m
        p = p - lr * minimum(1.0, 1.1 / (rms(u) + 1e-6)) * u
        return p, momentum_buffer, diagonal, left, right, short, long
    if oblong:
        w, long = wide(m), long + where(t > 1, 0.0, 1.0)
        if refresh:
            scale = column_norms(w, long)
            a = short @ w * scale
            b = solve_triangular(wide(normal(g, t)), short.T, upper=False) / maximum(scale, 1e-30)
            short = finite(whitened(short, a, b, lr_precond), short)
            aa, bb = column_norms(long, a), column_norms(long, b)
            aa, bb = aa * aa, bb * bb
            long = finite(long - lr_precond * (aa - bb) * long / (mat_max(aa + bb) + EPS), long)
        scale = column_norms(w, long)
        u = unwide(m, short.T @ (short @ w) * scale * scale)
    else:
        if refresh:
            a, b = left @ m @ right.T, solve_triangular(normal(g, t), left.T, upper=False)
            b = solve_triangular(b.T, right.T, upper=False).T
            l, r = balanced(whitened(left, a, b, lr_precond), whitened(right, a.T, b.T, lr_precond))
            left, right = finite(l, left), finite(r, right)
        u = left.T @ (left @ m @ right.T) @ right
    size = mat_norm(wide(u)) / sqrt(rows(p) * columns(p))
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * minimum(1.0, 1.1 / (size + 1e-6)) * u
    return p, momentum_buffer, diagonal, left, right, short, long
