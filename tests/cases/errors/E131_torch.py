import torch

from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def tensors(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = 0.9 * m + g * g
    p = p - lr * g / torch.sqrt(m)
    return p, m
