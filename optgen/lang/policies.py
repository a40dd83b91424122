"""The parts that several rules share: weight decay and heavy-ball momentum.

A rule applies `weight_decay` by one of the first functions here: `l2` changes the gradient that every later line
sees, the others change the weight.
"""

from __future__ import annotations

from contextvars import ContextVar

from optgen.lang.matrices import bjorck, finite, orthogonal_iteration, sorting
from optgen.lang.reductions import amax, columns, dot, elements, norm, row_sum
from optgen.lang.values import Num, maximum, sign, sqrt, where

DECAYED: ContextVar[list[tuple[Num, Num]] | None] = ContextVar("DECAYED", default=None)
"""The weights before and after decay of a rule whose step a wrapper takes apart."""


def decayed(p: Num, new: Num) -> Num:
    """Return `new`, which decoupled weight decay has made of the weight p, and let wrappers know that it is so."""
    if (marks := DECAYED.get()) is not None:
        marks.append((p, new))
    return new


def l2(g: Num, p: Num, weight_decay: Num) -> Num:
    """The gradient of the loss plus weight_decay / 2 * |p|^2."""
    return g + weight_decay * p


def decoupled(p: Num, lr: Num, weight_decay: Num) -> Num:
    """The weight shrunk by lr * weight_decay before the step (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    return decayed(p, p * (1 - lr * weight_decay))


def proximal(p: Num, lr: Num, weight_decay: Num) -> Num:
    """The implicit form, applied to the weight after the step: p / (1 + lr * weight_decay)."""
    return p / (1 + lr * weight_decay)


def cautious(p: Num, u: Num, lr: Num, weight_decay: Num) -> Num:
    """Decoupled decay but where it points against the step p -= lr * u (Chen et al. 2025, arXiv:2510.12402).

    What has no step (u = 0) decays.  Signs are compared, since a product of two small numbers is 0 in fp32.
    """
    return decayed(p, where(sign(u) * sign(p) >= 0, decoupled(p, lr, weight_decay), p))


def schedule_of(lr: Num, peak_lr: Num) -> Num:
    """lr relative to the largest lr so far; 0 while lr has been 0 only.

    In the place of lr in `decoupled` it makes the decay follow the schedule alone, whatever the size of lr.
    """
    return lr / maximum(peak_lr, 1e-30)


def adamw_step(
    p: Num, g: Num, t: Num, m: Num, v: Num, lr: Num, betas: tuple[Num, Num], eps: Num, weight_decay: Num
) -> tuple[Num, Num, Num]:
    """(p, m, v) after a step of AdamW, for the parameters that a rule for matrices leaves to it."""
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denom = sqrt(v) / sqrt(1 - beta2**t) + eps
    return decoupled(p, lr, weight_decay) - lr / (1 - beta1**t) * m / denom, m, v


def heavy_ball(buffer: Num, g: Num, t: Num, momentum: Num, dampening: Num) -> Num:
    """The momentum buffer of torch.optim.SGD: the gradient itself at the first step, damped ones after it."""
    decay = where(t > 1, momentum, 0.0)
    gain = where(t > 1, 1 - dampening, 1.0)
    return decay * buffer + gain * g


def rotated(factor: Num, basis: Num, turn: Num) -> tuple[Num, Num]:
    """(factor, basis) of a side of a matrix after a change of its basis, which stays orthogonal: roundings add up."""
    return turn.T @ factor @ turn, bjorck(basis @ turn)


def renewed(factor: Num, basis: Num, known: Num) -> tuple[Num, Num, Num, Num]:
    """(order, turn, factor, basis) of a side of a matrix whose basis is brought nearer to the factor's eigenvectors.

    turn   the change of the basis; a factor that is not finite is forgotten, and turns nothing
    order  the permutation that sorts the directions, which is the change without the iteration
    known  a condition: where it does not hold, the basis is the eigenvectors themselves
    """
    factor = finite(factor)
    order = sorting(factor)
    turn = finite(orthogonal_iteration(factor, order, known), order)
    return (order, turn, *rotated(factor, basis, turn))


def without_radial(u: Num, p: Num, g: Num, delta: Num, eps: Num) -> tuple[Num, Num]:
    """(the step u without what only rescales p, 1.0) where p looks scale-invariant, else (u, 0.0).

    It does where the gradient is at right angles to it, |cos| < delta / sqrt(dimension): first in every row, and then
    each row is projected; or else in the whole tensor (Heo et al. 2021, arXiv:2006.08217).
    """
    p_row, g_row = sqrt(row_sum(p * p)) + eps, sqrt(row_sum(g * g)) + eps
    by_rows = amax(abs(row_sum(p * g)) / (p_row * g_row)) < delta / sqrt(columns(p))
    p_all, g_all = norm(p) + eps, norm(g) + eps
    whole = abs(dot(p, g)) / (p_all * g_all) < delta / sqrt(elements(p))
    of_row, of_all = row_sum(p * u) / (p_row * p_row), dot(p, u) / (p_all * p_all)
    radial = where(by_rows, of_row, where(whole, of_all, 0.0))
    return u - radial * p, where(by_rows | whole, 1.0, 0.0)
