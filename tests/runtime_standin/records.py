"""AdamW with the operations of torch's single-tensor implementation, in its order."""

import math

SCALARS = ("sign", "decay", "weight1", "beta2", "weight2", "root", "eps", "size")


def host(step, grad_scale, *, lr, betas, eps, weight_decay, decay_product=None):
    beta1, beta2 = betas
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    scalars = (
        grad_scale, 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, math.sqrt(correction2), eps, lr / correction1,
    )  # fmt: skip
    return scalars if decay_product is None else (*scalars, decay_product * beta1)


def update(p, g, m, v, v_max, sign, decay, weight1, beta2, weight2, root, eps, size):
    """One step in place on fp32 tensors; v_max is None without amsgrad."""
    if sign < 0:
        g = -g
    p.mul_(decay)
    m.lerp_(g, weight1)
    v.mul_(beta2).addcmul_(g, g, value=weight2)
    if v_max is not None:
        v_max.copy_(v.maximum(v_max))
        v = v_max
    p.addcdiv_(m, (v.sqrt() / root).add_(eps), value=-size)
