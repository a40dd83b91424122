"""AdEMAMix: Adam with a fast and a slow momentum."""

from optgen.lang import exp, hyper, log, maximum, minimum, nonneg, optimizer, sqrt, state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Pagliardini, Ablin & Grangier 2024, arXiv:2409.03137", name="AdEMAMix")
def ademamix(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_slow=state(),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper(
        (0.9, 0.999, 0.9999), ge=0, lt=1,
        doc="the decays of the gradient's, its square's and the slow momentum's averages",
    ),
    alpha=hyper(5.0, ge=0, doc="the weight of the slow momentum"),
    alpha_warmup=hyper(0.0, ge=0, doc="steps over which alpha grows"),
    beta3_warmup=hyper(0.0, ge=0, doc="steps over which the slow momentum's half-life grows"),
    eps=hyper(1e-8, ge=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Adam with a second, slow momentum of weight alpha, decay beta3.

    alpha grows linearly over alpha_warmup steps; the half-life of the slow momentum over beta3_warmup steps.
    """
    beta1, beta2, beta3 = betas
    mix = alpha * minimum(t / maximum(alpha_warmup, 1.0), 1.0)
    ramp = minimum(t / maximum(beta3_warmup, 1.0), 1.0)
    log1, log3 = log(maximum(beta1, 1e-8)), log(maximum(beta3, 1e-8))
    slow = exp(log1 * log3 / ((1 - ramp) * log3 + ramp * log1))
    beta3_now = where(t < beta3_warmup, minimum(slow, beta3), beta3)
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_slow = beta3_now * exp_avg_slow + (1 - beta3_now) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    p = p - lr * (exp_avg / (1 - beta1**t) + mix * exp_avg_slow) / denom
    return p, exp_avg, exp_avg_slow, exp_avg_sq
