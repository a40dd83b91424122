from optgen.lang import hyper, matrix_state, optimizer, shape_flag, symmetric


@optimizer(cite="nobody")
def leaning(
    p, g, q=matrix_state("rows", symmetric, when="matrix"),
    *,
    lr=hyper(1e-3, ge=0), matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if matrix:
        q = 0.9 * q + 0.1 * (g @ p.T)
        g = q @ g
    p = p - lr * g
    return p, q
