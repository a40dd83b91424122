"""TAM: momentum into which gradients go by how well they are aligned with it."""

from optgen.lang import dot, hyper, norm, optimizer, state, tensor_state, where
from optgen.lang.policies import decoupled


@optimizer(cite="Malviya et al. 2024, arXiv:2412.18790", name="TAM")
def tam(
    p, g,
    momentum_buffer=state(),
    s=tensor_state(),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.9, ge=0, lt=1, doc="the decay of the momentum, which is a weighted sum of gradients"),
    decay_rate=hyper(0.9, ge=0, lt=1, doc="the decay of the average cosine of momentum and gradient"),
    eps=hyper(1e-8, ge=0, doc="added to the gradient's weight, so that it is not 0"),
    weight_decay=hyper(0.0, ge=0),
):
    """s is an average of the cosine between a tensor's momentum and its gradient, which has the weight (1 + s) / 2."""
    lengths = norm(momentum_buffer) * norm(g)
    s = decay_rate * s + (1 - decay_rate) * where(lengths > 0, dot(momentum_buffer, g) / lengths, 0.0)
    momentum_buffer = momentum * momentum_buffer + ((1 + s) / 2 + eps) * g
    p = decoupled(p, lr, weight_decay)
    p = p - lr * momentum_buffer
    return p, momentum_buffer, s
