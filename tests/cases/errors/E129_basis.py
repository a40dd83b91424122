from optgen.lang import eigenvectors, gram, hyper, matrix_state, newton_schulz, optimizer, orthogonal, shape_flag


@optimizer(cite="nobody", matrix="heads")
def twice_turned(
    p, g, basis=matrix_state("rows", orthogonal, when="matrix", init="identity"),
    *,
    lr=hyper(1e-2, ge=0), matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if matrix:
        turned = newton_schulz(basis.T @ g)
        g = newton_schulz(basis @ turned)
        basis = eigenvectors(gram(g))
    p = p - lr * g
    return p, basis
