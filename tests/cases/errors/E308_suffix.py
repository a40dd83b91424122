from optgen.formats import Blocked, Plan
from optgen.lang import hyper, nonneg, optimizer, state
from optgen.ops import dtypes

bytewise = Plan("8-bit moments.", signed=Blocked())


@optimizer(cite="nobody")
def rescaled(p, g, m_scale=state(nonneg), m=state(), *, lr=hyper(1e-3)):
    m_scale = 0.99 * m_scale + g * g
    m = 0.9 * m + g
    p = p - lr * (m - m_scale)
    return p, m_scale, m


def case():
    bytewise.storage(rescaled.states, dtypes.bf16, small=False)
