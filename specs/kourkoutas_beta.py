"""Kourkoutas-beta: Adam whose second moment forgets faster when a tensor's gradient is longer than usual."""

from optgen.lang import hyper, nonneg, norm, optimizer, sqrt, state, tensor_state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Kassinos 2025, arXiv:2508.12996", name="KourkoutasBeta")
def kourkoutas_beta(
    p, g, t,
    exp_avg=state(),
    exp_avg_sq=state(nonneg),
    grad_ema=tensor_state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    beta1=hyper(0.9, ge=0, lt=1),
    beta2_max=hyper(0.999, ge=0, lt=1),
    beta2_min=hyper(0.9, ge=0, lt=1),
    alpha=hyper(0.9, ge=0, lt=1),
    tiny_spike=hyper(1e-8, gt=0),
    warmup_steps=hyper(0, ge=0),
    eps=hyper(1e-8, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """beta2 goes from beta2_max toward beta2_min by r / (1 + r), with r the norm over its average (alpha).

    In the first warmup_steps it is halfway between.  A layer is a tensor here; there are no bias corrections.
    """
    length = norm(g)
    grad_ema = alpha * grad_ema + (1 - alpha) * length
    ratio = length / (grad_ema + tiny_spike)
    share = (1 - beta2_max) + (beta2_max - beta2_min) * where(t > warmup_steps, ratio / (1 + ratio), 0.5)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_avg_sq = (1 - share) * exp_avg_sq + share * g * g
    p = decoupled(p, lr, weight_decay)
    p = p - lr * exp_avg / (sqrt(exp_avg_sq) + eps)
    return p, exp_avg, exp_avg_sq, grad_ema
