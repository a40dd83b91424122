"""AdaTAM: Adam with torque-aware momentum."""

from optgen.lang import dot, hyper, nonneg, norm, optimizer, sqrt, state, tensor_state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Malviya et al. 2024, arXiv:2412.18790", name="AdaTAM")
def adatam(
    p, g,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    s=tensor_state(),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1,
        doc="the decays of the momentum, which is a weighted sum, and of the average of squares",
    ),
    decay_rate=hyper(0.9, ge=0, lt=1, doc="the decay of the average cosine of momentum and gradient"),
    eps=hyper(1e-8, gt=0, doc="added to the gradient's weight, and to the root that divides"),
    weight_decay=hyper(0.0, ge=0),
):
    """TAM's momentum over the root of Adam's second moment, without bias corrections."""
    beta1, beta2 = betas
    lengths = norm(exp_avg) * norm(g)
    s = decay_rate * s + (1 - decay_rate) * where(lengths > 0, dot(exp_avg, g) / lengths, 0.0)
    exp_avg = beta1 * exp_avg + ((1 + s) / 2 + eps) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    p = decoupled(p, lr, weight_decay)
    p = p - lr * exp_avg / (sqrt(exp_avg_sq) + eps)
    return p, exp_avg, exp_avg_sq, s
