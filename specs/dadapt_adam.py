"""D-Adaptation of Adam: its learning rate follows a lower bound of how far the weights have to go."""

from optgen.lang import (
    flag, hyper, maximum, minimum, model_dot, model_state, model_total, nonneg, optimizer, policies, sqrt, state,
    where,
)  # fmt: skip


@optimizer(cite="Defazio & Mishchenko 2023, arXiv:2301.07733", name="DAdaptAdam")
def dadapt_adam(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    s=state(),
    d=model_state(nonneg, init="d0"),
    numerator_weighted=model_state(),
    *,
    lr=hyper(1.0, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    d0=hyper(1e-6, gt=0),
    growth_rate=hyper(3e38, gt=0),
    use_bias_correction=flag(False),
):
    beta1, beta2 = betas
    beta3 = sqrt(beta2)
    rate = d * lr * (sqrt(1 - beta2**t) / (1 - beta1**t) if use_bias_correction else 1.0)
    numerator = rate * model_dot(g, s / (sqrt(exp_avg_sq) + eps))
    numerator_weighted = beta3 * numerator_weighted + (1 - beta3) * numerator
    exp_avg = beta1 * exp_avg + (1 - beta1) * rate * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    s = beta3 * s + (1 - beta3) * rate * g
    total = model_total(abs(s))
    d_hat = numerator_weighted / maximum((1 - beta3) * total, 1e-37)
    p = policies.decoupled(p, rate, weight_decay)
    p = p - exp_avg / (sqrt(exp_avg_sq) + eps)
    d = maximum(d, where(total > 0, minimum(d_hat, d * growth_rate), 0.0))
    return p, exp_avg, exp_avg_sq, s, d, numerator_weighted
