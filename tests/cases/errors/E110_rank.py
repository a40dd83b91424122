from optgen.lang import hyper, low_rank_state, optimizer, shape_flag


@optimizer(cite="nobody", matrix="heads")
def sketch(
    p, g,
    low=low_rank_state("rows", rank="width", when="is_matrix"),
    *,
    lr=hyper(1e-2, ge=0),
    is_matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if is_matrix:
        low = low + g @ g.T @ low
    p = p - lr * g
    return p, low
