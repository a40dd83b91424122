"""Muon: momentum of a weight matrix, made orthogonal; AdamW for everything that is no matrix."""

from optgen.lang import (
    columns, flag, hyper, maximum, newton_schulz, nonneg, optimizer, policies, rows, shape_flag, sqrt, state,
)  # fmt: skip


@optimizer(
    cite="Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982", matrix="heads"
)
def muon(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    *,
    lr=hyper(1e-3, ge=0, doc="the learning rate of matrices; usual: 0.02, or AdamW's with match_rms_adamw"),
    weight_decay=hyper(0.1, ge=0),
    momentum=hyper(0.95, ge=0, lt=1, doc="the decay of the momentum"),
    ns_coefficients=hyper((3.4445, -4.7750, 2.0315), series=True),
    eps=hyper(1e-7, gt=0, doc="added to the norm that Newton-Schulz divides by"),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    scale_floor=hyper(1.0, ge=0, doc="the least rows / columns under the root that scales a step"),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    adamw_eps=hyper(1e-8, gt=0),
    nesterov=flag(True),
    match_rms_adamw=flag(False, doc="scale by 0.2 sqrt(max(rows, columns)), so that rates of AdamW serve"),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """Muon: momentum of a weight matrix, made orthogonal; AdamW for everything that is no matrix.

    Each matrix of a stack [experts, rows, columns] is one of its own, and convolutions are matrices of their output
    channels: `blocks` says which of the two, and how many heads a matrix has.  Groups with adamw=True (embeddings, the
    head) take AdamW whatever their shape.

    lr is the rate of all that a group has.  Vectors beside matrices take AdamW at adamw_lr * lr / base_lr, where
    base_lr is the lr that the group was made with, so that adamw_lr follows schedules.  A group with adamw=True steps
    at its own lr, which is adamw_lr if it is made without one: {"params": embeddings, "adamw": True, "lr": 3e-4}.
    Usual rates are 0.02 for matrices (with match_rms_adamw that of AdamW) and 3e-4 to 3e-3 for all else.

    ns_coefficients "jordan", "polar_express", "deepseek" or "cubic", (a, b, c), or a list of those of each round, of
    which the last goes on.  A step is scaled by
    sqrt(max(scale_floor, rows / columns)): with scale_floor=0 all have a spectral norm of sqrt(rows / columns).
    match_rms_adamw scales by 0.2 sqrt(max(rows, columns)) instead, so that learning rates of AdamW serve (Moonlight).
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, adamw_eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    direction = momentum * momentum_buffer + (1 - momentum) * g if nesterov else momentum_buffer
    direction = newton_schulz(direction, ns_steps, ns_coefficients, eps)
    height, width = rows(p), columns(p)
    scale = 0.2 * sqrt(maximum(height, width)) if match_rms_adamw else sqrt(maximum(scale_floor, height / width))
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * scale * direction
    return p, momentum_buffer, exp_avg_sq
