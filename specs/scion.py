"""Scion: steps of one size in a norm of each layer: spectral for matrices, root mean square for vectors."""

from optgen.lang import (
    columns, flag, hyper, newton_schulz, optimizer, rms, row_mean, rows, shape_flag, sign, sqrt, state,
)  # fmt: skip


@optimizer(cite="Pethick et al. 2025, arXiv:2502.07529, algorithms 1 and 2", matrix="heads")
def scion(
    p, g,
    momentum_buffer=state(),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.1, gt=0, le=1, doc="the part of the gradient in the average"),
    scale=hyper(1.0, ge=0, doc="the radius of the ball that the weights stay in"),
    unconstrained=hyper(False, doc="leave the weights free of the ball of radius `scale`"),
    normalized=hyper(True, doc="False for an embedding of (vocabulary, features)"),
    ns_coefficients=hyper((3.4445, -4.7750, 2.0315), series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    eps=hyper(1e-8, gt=0),
    sign_norm=flag(False, doc="a step by signs, for the head"),
    row_norm=flag(False, doc="a step of normalized rows, for the head"),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """Scion: steps of one size in a norm of each layer: spectral for matrices, root mean square for vectors.

    The weights stay in the ball of radius `scale` in that norm, where 1 is that of an operator which leaves the root
    mean square of its input, unless unconstrained; momentum is the part of the gradient in the average.  Groups take
    other norms: the head sign_norm=True or row_norm=True, an embedding (vocabulary, features) the same with
    normalized=False.  `blocks` and ns_coefficients are those of Muon.
    """
    momentum_buffer = (1 - momentum) * momentum_buffer + momentum * g
    if matrix:
        width = 1 + normalized * (columns(p) - 1)
        if sign_norm:
            step = sign(momentum_buffer) / width
        elif row_norm:
            step = momentum_buffer / (width * sqrt(row_mean(momentum_buffer * momentum_buffer)) + eps)
        else:
            step = sqrt(rows(p) / width) * newton_schulz(momentum_buffer, ns_steps, ns_coefficients)
    else:
        step = momentum_buffer / (rms(momentum_buffer) + eps)
    p = p * (1 - lr * (1 - unconstrained)) - lr * scale * step
    return p, momentum_buffer
