"""Rprop: resilient backpropagation."""

from optgen.lang import clip, hyper, nonneg, optimizer, sign, state, where


@optimizer(cite="Riedmiller & Braun 1993, ICNN", like="torch.optim.Rprop")
def rprop(
    p, g, t,
    prev=state(),
    step_size=state(nonneg),
    *,
    lr=hyper(1e-2, ge=0, doc="the first step's size"),
    etas=hyper((0.5, 1.2), gt=0, doc="the factors of a step after a turn, and without one"),
    step_sizes=hyper((1e-6, 50.0), ge=0, doc="the least and the largest step"),
):
    """Only the sign of the gradient counts; each weight's step grows while the sign holds and shrinks when it turns.

    lr is the first step's size; where it is 0 nothing moves.
    """
    etaminus, etaplus = etas
    step_size_min, step_size_max = step_sizes
    agreement = g * prev
    size = step_size + where(t > 1, 0.0, lr)
    scaled = where(agreement > 0, size * etaplus, where(agreement < 0, size * etaminus, size))
    step_size = clip(scaled, step_size_min, step_size_max)
    # After a turn the gradient is forgotten, so that the next step does not turn again.
    prev = where(agreement < 0, 0.0, g)
    p = p - where(lr > 0, step_size, 0.0) * sign(prev)
    return p, prev, step_size
