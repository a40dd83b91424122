from optgen.lang import hyper, low_rank_state, optimizer, shape_flag


@optimizer(cite="nobody")
def unprojected(
    p, g, m=low_rank_state("rows", rank="rank", when="matrix"),
    *,
    lr=hyper(1e-3, ge=0), rank=hyper(4, ge=1, whole=True), matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    if matrix:
        m = 0.9 * g
    p = p - lr * g
    return p, m
