"""Adam-mini: AdamW with one second moment per block of a matrix (a row, a head), and per tensor elsewhere."""

from optgen.lang import hyper, mean, nonneg, optimizer, row, row_mean, shape_flag, sqrt, state, tensor_state
from optgen.lang.policies import decoupled


@optimizer(cite="Zhang et al. 2024, arXiv:2406.16793", name="AdamMini", matrix="blocks")
def adam_mini(
    p, g, t,
    m=state(),
    vmean_row=row(nonneg, when="by_rows"),
    vmean=tensor_state(nonneg, when="not by_rows"),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of the gradient and of the mean squares of blocks"
    ),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    by_rows=shape_flag(lambda shape: len(shape) >= 2),
):
    """AdamW whose second moment is that of a block's mean square: of an output neuron, or of a whole tensor.

    blocks={"*.q_proj.weight": heads, "*.k_proj.weight": heads} makes it one of an attention head.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    m = beta1 * m + (1 - beta1) * g
    if by_rows:
        vmean_row = beta2 * vmean_row + (1 - beta2) * row_mean(g * g)
    else:
        vmean = beta2 * vmean + (1 - beta2) * mean(g * g)
    second = vmean_row if by_rows else vmean
    denom = sqrt(second) / sqrt(1 - beta2**t) + eps
    p = p - lr / (1 - beta1**t) * m / denom
    return p, m, vmean_row, vmean
