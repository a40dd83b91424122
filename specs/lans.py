"""LANS: LAMB of normalized gradients, with Nesterov's momentum."""

from optgen.lang import hyper, maximum, nonneg, norm, optimizer, sqrt, state, where


@optimizer(cite="Zheng et al. 2020, arXiv:2006.13484, algorithm 2", name="LANS")
def lans(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-6, gt=0),
    weight_decay=hyper(1e-2, ge=0),
):
    """A tensor's gradient has length 1; momentum and gradient make a step of the weight's length each.

    A weight of length 0 takes the step as it is.
    """
    beta1, beta2 = betas
    g = g / maximum(norm(g), 1e-30)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps
    slow = exp_avg / (1 - beta1**t) / denom + weight_decay * p
    fast = g / denom + weight_decay * p
    length, of_slow, of_fast = norm(p), norm(slow), norm(fast)
    first = where(length > 0, length, of_slow) / maximum(of_slow, 1e-30)
    second = where(length > 0, length, of_fast) / maximum(of_fast, 1e-30)
    p = p - lr * (beta1 * first * slow + (1 - beta1) * second * fast)
    return p, exp_avg, exp_avg_sq
