"""SOAP-Muon: Muon of SOAP's direction, with a floor for each row and norms that steps reach; AdamW for the rest."""

from optgen.lang import (
    capped, columns, flag, gram, hyper, mat_mean, mat_norm, matrix_state, maximum, newton_schulz, nonneg, optimizer,
    orthogonal, policies, row_sum, rows, scalar, shape_flag, sign, sqrt, state, symmetric, where, wide,
)  # fmt: skip


def pinned(p, u, lr, weight_decay, row_floor, outward):
    """The weight after u and cautious decay, without the drift of its norm; see the rule."""
    uu, up, pp = row_sum(u * u), row_sum(u * p), row_sum(p * p)
    size, along = mat_mean(pp) * rows(p), mat_mean(up) * rows(p)
    brake = where(along < 0, (1 - outward) * along / maximum(size, 1e-12), 0.0)
    uu, up = maximum(uu - 2 * brake * up + brake * brake * pp, 0.0), up - brake * pp
    lift = maximum(row_floor * sqrt(maximum(pp, 1e-16) / maximum(uu, 1e-16)), 1.0)
    along, step_sq = mat_mean(lift * up) * rows(p), mat_mean(lift * lift * uu) * rows(p)
    radius = sqrt(maximum(size, 1e-16))
    wanted = maximum(radius - lr * along / radius, 1e-8)
    u = lift * (u - brake * p)
    new = wanted / sqrt(maximum(size - 2 * lr * along + lr * lr * step_sq, 1e-16)) * (p - lr * u)
    return where(sign(u) * sign(p) > 0, policies.decoupled(new, lr, weight_decay), new)


def without_lookahead(p, lookahead_avg, *, lookahead):
    """The weights to evaluate with."""
    return p - lookahead * lookahead_avg


@optimizer(
    cite="Vyas et al. 2025, nikhilvyas.github.io/SOAP_Muon.pdf, as modded-nanogpt's record 46 of track 3 has it",
    name="SOAPMuon", matrix="heads", evaluate=without_lookahead,
)  # fmt: skip
def soap_muon(
    p, g, t,
    momentum_buffer=state(),
    exp_avg_sq=state(nonneg),
    lookahead_avg=state(),
    left=matrix_state("rows", symmetric, when="matrix and not adamw"),
    basis_left=matrix_state("rows", orthogonal, when="matrix and not adamw", init="identity"),
    right=matrix_state("columns", symmetric, when="matrix and not adamw"),
    basis_right=matrix_state("columns", orthogonal, when="matrix and not adamw", init="identity"),
    went=scalar(0.0),
    *,
    lr=hyper(0.0375, ge=0, doc="the learning rate of matrices"),
    momentum=hyper(
        0.95, ge=0, lt=1, doc="the decay of the average of the gradient, and its weight beside the newest one"
    ),
    shampoo_beta=hyper(0.9, ge=0, lt=1, doc="the decay of the factors and of the second moment"),
    weight_decay=hyper(0.025, ge=0),
    row_floor=hyper(0.3825, ge=0, doc="the least step of a row, relative to its norm"),
    outward=hyper(0.5, ge=0, le=1, doc="the part of what makes a matrix longer that is applied"),
    lookahead=hyper(0.3, ge=0, doc="how far ahead gradients are taken, in average changes"),
    lookahead_beta=hyper(0.99, ge=0, lt=1, doc="the decay of the average change"),
    eps=hyper(1e-8, gt=0, doc="the least root that divides; under AdamW, added to it"),
    ns_coefficients=hyper((2.0, -1.5, 0.5), series=True),
    ns_steps=hyper(12, ge=1, lt=100, whole=True),
    adamw_lr=hyper(1e-3, ge=0, scheduled=True, lr_if="adamw"),
    adamw_betas=hyper((0.9, 0.95), ge=0, lt=1),
    max_precond_dim=hyper(10000, ge=1, whole=True, doc="the longest side that has a factor of its own"),
    adamw=flag(False),
    matrix=shape_flag(lambda shape, max_precond_dim: len(shape) >= 2 and max(shape[-2:]) <= max_precond_dim),
):
    """SOAP-Muon: Muon of SOAP's direction, with a floor for each row and norms that steps reach; AdamW for the rest.

    Bases change at every step; the first one is Muon's.  Of what makes a matrix longer, the part `outward` is applied
    (radial brake); rows have steps of row_floor times their norms at least; the norm then changes as the step along the
    weight says.  Weights decay where the step makes them smaller.  Gradients are taken `lookahead` times an average of
    all changes ahead (EMA-Nesterov); eval() takes that away.  A change of lookahead holds from the next step on.
    Groups with adamw=True, vectors and matrices with a side of more than max_precond_dim have AdamW, at the rates that
    Muon has for them.  Elements of other gradients count as 1e14 at most, so that fp32 has their squares' sums.
    """
    start = p - went * lookahead_avg
    if adamw or not matrix:
        p, momentum_buffer, exp_avg_sq = policies.adamw_step(
            p, g, t, momentum_buffer, exp_avg_sq, adamw_lr, adamw_betas, eps, weight_decay
        )
    else:
        g = capped(g, 1e14)
        momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
        inside = basis_left.T @ (momentum * momentum_buffer + (1 - momentum) * g) @ basis_right
        exp_avg_sq = shampoo_beta * exp_avg_sq + (1 - shampoo_beta) * where(t > 1, 1.0, 0.0) * inside * inside
        inside = inside / where(t > 1, maximum(sqrt(exp_avg_sq), eps), 1.0)
        even = basis_left @ inside @ basis_right.T
        even = even / sqrt(maximum(mat_norm(gram(wide(even))), 1e-14))
        u = newton_schulz(even, ns_steps, ns_coefficients, normalize=False)
        p = pinned(p, sqrt(maximum(1.0, rows(p) / columns(p))) * u, lr, weight_decay, row_floor, outward)
        turned = basis_left.T @ g @ basis_right
        left = shampoo_beta * left + (1 - shampoo_beta) * gram(turned)
        right = shampoo_beta * right + (1 - shampoo_beta) * gram(turned.T)
        order_left, _, left, basis_left = policies.renewed(left, basis_left, known=t > 1)
        order_right, _, right, basis_right = policies.renewed(right, basis_right, known=t > 1)
        exp_avg_sq = order_left.T @ exp_avg_sq @ order_right
    lookahead_avg = lookahead_beta * lookahead_avg + (1 - lookahead_beta) * (p - start)
    p, went = p + lookahead * lookahead_avg, lookahead
    return p, momentum_buffer, exp_avg_sq, lookahead_avg, left, basis_left, right, basis_right, went
