"""KATE: Adagrad that does not depend on the scale of the data."""

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang.policies import decoupled


@optimizer(cite="Choudhury et al. 2024, arXiv:2403.02648", name="KATE")
def kate(
    p, g,
    m_sq=state(nonneg),
    b_sq=state(nonneg),
    *,
    lr=hyper(1e-3, ge=0),
    delta=hyper(0.0, ge=0, doc="the paper's eta, the weight of the squares in the numerator"),
    eps=hyper(1e-8, gt=0, doc="added to the sum of squares at each step"),
    weight_decay=hyper(0.0, ge=0),
):
    """The gradient over the sum of its squares, times a root that grows with it; delta is the paper's eta.

    A step adds eps to the sum. The states are squares of the paper's m and b.
    """
    p = decoupled(p, lr, weight_decay)
    square = g * g
    b_sq = b_sq + square + eps
    m_sq = m_sq + delta * square + square / b_sq
    p = p - lr * sqrt(m_sq) * g / b_sq
    return p, m_sq, b_sq
