from optgen.lang import hyper, matmul, matrix_state, optimizer, shape_flag, transpose


@optimizer(cite="nobody", matrix="heads")
def of_diagonal(
    p, g, left=matrix_state("rows", when="matrix"),
    *,
    lr=hyper(1e-3, ge=0), matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if matrix:
        left = 0.9 * left + matmul(g, transpose(g))
        g = matmul(diagonal(left), g)
    p = p - lr * g
    return p, left
