"""AdaGO: Muon at a rate that falls as Adagrad's does; AdamW for everything that is no matrix."""

from optgen.lang import (
    flag, hyper, maximum, minimum, newton_schulz, nonneg, norm, optimizer, policies, shape_flag, sqrt, state,
    tensor_state,
)  # fmt: skip


@optimizer(cite="Zhang, Liu & Schaeffer 2025, arXiv:2509.02981, algorithm 1", name="AdaGO", matrix="heads")
def adago(
    p, g, t,
    momentum_buffer=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg, when="not matrix or adamw"),
    grad_sq=tensor_state(nonneg, when="matrix and not adamw", init="v0"),
    *,
    lr=hyper(0.05, ge=0, doc="the learning rate of matrices"),
    weight_decay=hyper(0.0, ge=0),
    momentum=hyper(0.95, ge=0, lt=1, doc="the decay of the momentum"),
    gamma=hyper(10.0, gt=0, doc="the largest norm that counts"),
    eps=hyper(5e-4, ge=0, scheduled=True, doc="the least step"),
    v0=hyper(1e-6, gt=0, doc="the first sum of squared norms"),
    ns_coefficients=hyper((3.4445, -4.7750, 2.0315), series=True),
    ns_steps=hyper(5, ge=1, lt=100, rounds_of="ns_coefficients", whole=True),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    adamw_eps=hyper(1e-8, gt=0),
    adamw=flag(False),
    matrix=shape_flag(lambda shape: len(shape) >= 2),
):
    """The step is lr times the gradient's norm over the root of the sum of its squares, and at least eps.

    Norms count for gamma at most.  `blocks`, adamw=True, adamw_lr and ns_coefficients are those of Muon; the norm
    is that of the whole parameter.  eps, a rate itself, follows schedules of lr as adamw_lr does.
    """
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, adamw_eps, weight_decay
        )
        return p, momentum_buffer, exp_avg_sq, grad_sq
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
    direction = newton_schulz(momentum_buffer, ns_steps, ns_coefficients)
    size = minimum(norm(g), gamma)
    grad_sq = grad_sq + size * size
    p = policies.decoupled(p, lr, weight_decay)
    p = p - maximum(lr * size / sqrt(grad_sq), eps) * direction
    return p, momentum_buffer, exp_avg_sq, grad_sq
