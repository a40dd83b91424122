from optgen.formats import Plan, floats
from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.ops import dtypes
from optgen.verify import lint

stuck = Plan("bf16 moments, rounded to nearest.", signed=floats.bf16, nonneg=floats.bf16, small_numel=0)


@optimizer(cite="nobody")
def slow(p, g, v=state(nonneg), *, lr=hyper(1e-3), beta=hyper(0.999)):
    v = beta * v + (1 - beta) * g * g
    p = p - lr * g / (sqrt(v) + 1e-8)
    return p, v


def case():
    lint.check(slow, stuck, stuck.storage(slow.states, dtypes.bf16, small=False))
