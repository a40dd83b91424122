"""PolarGrad: momentum of a weight matrix, made orthogonal and given its nuclear norm; AdamW for vectors."""

from optgen.lang import (
    columns, flag, hyper, mat_mean, newton_schulz, nonneg, optimizer, policies, rows, shape_flag, state,
)  # fmt: skip


@optimizer(cite="Lau et al. 2025, arXiv:2505.21799", name="PolarGrad", matrix="heads")
def polargrad(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    *,
    lr=hyper(0.02, ge=0, doc="the learning rate of matrices"),
    weight_decay=hyper(0.0, ge=0),
    momentum=hyper(0.95, ge=0, lt=1),
    ns_coefficients=hyper("polar_express", series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    adamw_eps=hyper(1e-8, gt=0),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """PolarGrad: momentum of a weight matrix, made orthogonal and given its nuclear norm; AdamW for vectors.

    The step vanishes with the gradient, as that of SGD does.  `blocks`, adamw=True, adamw_lr and
    ns_coefficients are those of Muon.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, adamw_eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    direction = newton_schulz(momentum_buffer, ns_steps, ns_coefficients)
    nuclear = mat_mean(momentum_buffer * direction) * (rows(p) * columns(p))
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * nuclear * direction
    return p, momentum_buffer, exp_avg_sq
