"""Signed momentum: a step of lr where a gradient keeps its sign, a smaller one where it does not."""

from optgen.lang import hyper, nonneg, optimizer, state


@optimizer(cite="an example of this repository")
def signed_momentum(
    p, g, average=state(), size=state(nonneg), *,
    lr=hyper(1e-3, ge=0),
    beta=hyper(0.9, ge=0, lt=1),
    eps=hyper(1e-12, gt=0),
    weight_decay=hyper(0.1, ge=0),
):
    average = beta * average + (1 - beta) * g
    size = beta * size + (1 - beta) * abs(g)
    steadiness = average / (size + eps)  # in [-1, 1]; the bias of the two averages cancels
    p = p * (1 - lr * weight_decay)
    p = p - lr * steadiness
    return p, average, size
