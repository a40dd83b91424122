"""FAdam: Adam as a natural gradient, with clipped steps and a decay in the same metric."""

from optgen.lang import hyper, maximum, minimum, nonneg, optimizer, rms, sqrt, state


@optimizer(cite="Hwang 2024, arXiv:2405.12807", name="FAdam")
def fadam(
    p, g, t,
    momentum=state(),
    fim=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of steps and of the Fisher information"),
    eps=hyper(1e-8, gt=0, doc="the largest number added to the root"),
    eps2=hyper(1e-2, gt=0, doc="the number added to the root, relative to the gradient's root mean square"),
    clip=hyper(1.0, gt=0, doc="the root mean square that steps are clipped to"),
    weight_decay=hyper(0.1, ge=0),
):
    """The gradient over the root of the empirical Fisher information, clipped to a root mean square, then averaged.

    eps is at most eps2 times the gradient's root mean square, and at least 1e-30.  The decay of the weight is divided
    and clipped likewise.
    """
    beta1, beta2 = betas
    keep = beta2 * (1 - beta2 ** (t - 1)) / (1 - beta2**t)
    fim = keep * fim + (1 - keep) * g * g
    floor = maximum(minimum(eps, eps2 * rms(g)), 1e-30)
    base = sqrt(fim) + floor
    natural, decay = g / base, p / base
    momentum = beta1 * momentum + (1 - beta1) * (natural / maximum(rms(natural) / clip, 1.0))
    p = p - lr * (momentum + weight_decay * decay / maximum(rms(decay) / clip, 1.0))
    return p, momentum, fim
