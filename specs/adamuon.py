"""AdaMuon: Muon of the momentum's signs, whose step each element's second moment evens out; AdamW for vectors."""

from optgen.lang import (
    columns, flag, hyper, mat_norm, newton_schulz, nonneg, optimizer, policies, rows, shape_flag, sign, sqrt, state,
)  # fmt: skip


@optimizer(cite="Si et al. 2025, arXiv:2507.11005, algorithm 1", name="AdaMuon", matrix="heads")
def adamuon(
    p, g, t,
    momentum_buffer=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(0.02, ge=0, doc="the learning rate of matrices"),
    weight_decay=hyper(0.01, ge=0),
    momentum=hyper(0.95, ge=0, lt=1, doc="the decay of the momentum"),
    eps=hyper(1e-8, gt=0),
    nesterov=hyper(True),
    ns_coefficients=hyper((3.4445, -4.7750, 2.0315), series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """AdaMuon: Muon of the momentum's signs, whose step each element's second moment evens out; AdamW for vectors.

    The step has the size of AdamW's: a root mean square of 0.2 lr.  `blocks`, adamw=True, adamw_lr and
    ns_coefficients are those of Muon.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    ahead = nesterov * (1 - momentum)
    direction = newton_schulz(sign((1 - ahead) * momentum_buffer + ahead * g), ns_steps, ns_coefficients)
    exp_avg_sq = momentum * exp_avg_sq + (1 - momentum) * direction * direction
    even = direction / (sqrt(exp_avg_sq) + eps)
    size = 0.2 * sqrt(rows(p) * columns(p)) / (mat_norm(even) + eps)
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr * size * even
    return p, momentum_buffer, exp_avg_sq
