"""StableSPAM: Adam of gradients whose spikes are clipped and whose norm is evened out, begun anew now and then."""

from optgen.lang import (
    amax, clip, flag, floor, hyper, maximum, minimum, nonneg, norm, optimizer, policies, sqrt, state, tensor_state,
    where,
)  # fmt: skip

from specs.spam import half_cosine


@optimizer(cite="Huang et al. 2025, arXiv:2502.17055", name="StableSPAM")
def stable_spam(
    p, g, t,
    exp_avg=state(normalized_by="exp_avg_sq"),
    exp_avg_sq=state(nonneg),
    max_avg=tensor_state(nonneg),
    norm_avg=tensor_state(nonneg),
    norm_sq_avg=tensor_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    betas=hyper((0.9, 0.999), ge=0, lt=1),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
    gamma1=hyper(0.7, ge=0, lt=1, doc="the decay of the average norm"),
    gamma2=hyper(0.9, ge=0, lt=1, doc="the decay of the average squared norm"),
    gamma3=hyper(0.999, ge=0, lt=1, doc="the decay of the average largest element"),
    update_proj_gap=hyper(1000, ge=1, doc="steps between two resets"),
    total_T=hyper(0, ge=0, doc="steps over which beta1 and gamma1 fall; 0: they stay"),
    eta_min=hyper(0.5, ge=0, le=1, doc="the part of beta1 and gamma1 that is left"),
    anneals=flag(nonzero="total_T"),
):
    """StableSPAM: Adam of gradients whose spikes are clipped and whose norm is evened out, begun anew now and then.

    Elements above the average of the gradient's largest (gamma3) are scaled by what it is to the largest; the norm of
    a tensor's gradient becomes its average (gamma1) over the root of that of its square (gamma2).  At the multiples of
    update_proj_gap the moments begin at 0 again, and their bias corrections with them.  In total_T steps
    beta1 and gamma1 fall to eta_min of themselves along a cosine; at total_T = 0 they stay.
    """
    beta1, beta2 = betas
    if anneals:
        end = maximum(total_T, 1) + 1
        fallen = eta_min + (1 - eta_min) * half_cosine(minimum((t + 1) / end, 1.0)) / half_cosine(1 / end)
        fallen = clip(where(t < total_T, fallen, eta_min), 0.0, 1.0)
        beta1, gamma1 = beta1 * fallen, gamma1 * fallen
    top = amax(abs(g))
    max_avg = gamma3 * max_avg + (1 - gamma3) * top
    limit = minimum(max_avg / (1 - gamma3**t), 1e14)  # fp32 has the square of the norm
    clipped = where(abs(g) > limit, g * (limit / maximum(top, 1e-30)), g)
    length = norm(clipped)
    norm_avg = gamma1 * norm_avg + (1 - gamma1) * length
    norm_sq_avg = gamma2 * norm_sq_avg + (1 - gamma2) * length * length
    even = norm_avg / (1 - gamma1**t) / (sqrt(norm_sq_avg / (1 - gamma2**t)) + eps)
    scaled = clipped * (even / maximum(length, 1e-30))
    since = where(t < update_proj_gap, t, t - update_proj_gap * floor(t / update_proj_gap) + 1)
    kept = where(since > 1, 1.0, 0.0)
    exp_avg = kept * beta1 * exp_avg + (1 - beta1) * scaled
    exp_avg_sq = kept * beta2 * exp_avg_sq + (1 - beta2) * scaled * scaled
    denom = sqrt(exp_avg_sq) / sqrt(1 - beta2**since) + eps
    p = policies.decoupled(p, lr, weight_decay)
    p = p - lr / (1 - beta1**since) * exp_avg / denom
    return p, exp_avg, exp_avg_sq, max_avg, norm_avg, norm_sq_avg
