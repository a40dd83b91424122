"""Simplified AdEMAMix: a slow momentum that is no average, and the gradient itself."""

from optgen.lang import hyper, log, maximum, minimum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Morwani et al. 2025, arXiv:2502.02431", name="SimplifiedAdEMAMix")
def simplified_ademamix(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-4, ge=0),
    betas=hyper((0.99, 0.95), gt=0, lt=1, doc="the decays of the sum of gradients and of the average square"),
    alpha=hyper(0.0, ge=0, doc="the weight of the newest gradient besides"),
    beta1_warmup=hyper(0, ge=0, doc="steps over which beta1's half-life grows"),
    min_beta1=hyper(0.9, gt=0, lt=1, doc="the first beta1"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """exp_avg is a sum of gradients that decays by beta1; alpha is the weight of the newest one besides.

    The half-life of beta1 grows from that of min_beta1 over the first beta1_warmup steps.
    """
    beta1, beta2 = betas
    share = minimum(t / maximum(beta1_warmup, 1.0), 1.0)
    half_life = (1 - share) * (log(0.5) / log(min_beta1)) + share * (log(0.5) / log(beta1))
    keep = where(t < beta1_warmup, 0.5 ** (1 / half_life), beta1)
    p = decoupled(p, lr, weight_decay)
    exp_avg = keep * exp_avg + g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    p = p - lr * (exp_avg + alpha * g) / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)
    return p, exp_avg, exp_avg_sq
