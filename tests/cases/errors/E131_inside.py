import torch

from optgen.lang import hyper, optimizer, state


@optimizer(cite="nobody")
def dropped(p, g, m=state(), *, lr=hyper(1e-3, ge=0)):
    m = torch.nn.functional.dropout(m, 0.5) + g
    p = p - lr * m
    return p, m
