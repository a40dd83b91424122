"""OrthoGrad: momentum of gradients without the part that only rescales the weight."""

from optgen.lang import dot, flag, hyper, norm, optimizer, state, where
from optgen.lang.policies import heavy_ball, l2


@optimizer(cite="Prieto et al. 2025, arXiv:2501.04697", name="OrthoGrad")
def orthograd(
    p, g, t,
    momentum_buffer=state(when="has_momentum"),
    *,
    lr=hyper(1e-3, ge=0),
    momentum=hyper(0.0, ge=0, doc="the decay of the momentum; 0 keeps none"),
    dampening=hyper(0.0),
    weight_decay=hyper(0.0, ge=0),
    nesterov=flag(False, needs="momentum", excludes="dampening"),
    has_momentum=flag(nonzero="momentum"),
):
    """SGD along the gradient's part at right angles to the weight, stretched to the gradient's own length.

    A part below 1e-5 of the gradient is rounding noise and counts as none: a lone number moves by decay only.
    """
    radial = dot(p, g) / (dot(p, p) + 1e-30)
    tangent = g - radial * p
    g_norm, tangent_norm = norm(g), norm(tangent)
    stretch = where(tangent_norm > 1e-5 * g_norm, g_norm / tangent_norm, 0.0)
    g = l2(stretch * tangent, p, weight_decay)
    update = g
    if has_momentum:
        momentum_buffer = heavy_ball(momentum_buffer, g, t, momentum, dampening)
        update = g + momentum * momentum_buffer if nesterov else momentum_buffer
    p = p - lr * update
    return p, momentum_buffer
