"""Lion-K: Lion whose sign is the gradient of a smooth function."""

from optgen.lang import clip, flag, hyper, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Chen et al. 2023, arXiv:2310.05898", name="LionK")
def lion_k(
    p, g,
    exp_avg=state(),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.9, 0.99), ge=0, lt=1, doc="the part of the average in the sign, and the decay of the average"),
    e=hyper(1e-3, gt=0, doc="the size below which an element's step is less than lr"),
    weight_decay=hyper(0.0, ge=0),
    huber=flag(False, doc="Huber's function in place of the root"),
):
    """K(x) is the sum of sqrt(x^2 + e^2), or Huber's function with the bound e; as e goes to 0 both are Lion.

    The paper has no default for e.
    """
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    mixed = beta1 * exp_avg + (1 - beta1) * g
    p = p - lr * (clip(mixed / e, -1.0, 1.0) if huber else mixed / sqrt(mixed * mixed + e * e))
    exp_avg = beta2 * exp_avg + (1 - beta2) * g
    return p, exp_avg
