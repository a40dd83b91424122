"""AdaHessian: Adam with the Hessian's diagonal, which the user feeds at every step, in the place of the gradient."""

from optgen.lang import hyper, input, nonneg, optimizer, power, state
from optgen.lang.policies import decoupled


@optimizer(cite="Yao et al. 2021, arXiv:2006.00719, Algorithm 1", name="AdaHessian")
def adahessian(
    p, g, t,
    exp_avg=state(normalized_by="exp_hessian_diag_sq"),
    exp_hessian_diag_sq=state(nonneg),
    hessian=input(),
    *,
    lr=hyper(0.1, ge=0),
    betas=hyper(
        (0.9, 0.999), ge=0, lt=1, doc="the decays of the averages of the gradient and of the Hessian's squared diagonal"
    ),
    hessian_power=hyper(1.0, gt=0, le=1, doc="the power of the Hessian's diagonal that divides"),
    eps=hyper(1e-16, gt=0),
    weight_decay=hyper(0.0, ge=0),
):
    """Feed u * (H u) of random signs u, averaged over neighbours as the paper has it, before every step."""
    beta1, beta2 = betas
    p = decoupled(p, lr, weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * g
    exp_hessian_diag_sq = beta2 * exp_hessian_diag_sq + (1 - beta2) * hessian * hessian
    v = exp_hessian_diag_sq / (1 - beta2**t)
    p = p - lr / (1 - beta1**t) * exp_avg / (power(v, 0.5 * hessian_power) + eps)
    return p, exp_avg, exp_hessian_diag_sq
