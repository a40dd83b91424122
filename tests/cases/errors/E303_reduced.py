from optgen.formats import Plan, floats
from optgen.lang import hyper, mean, nonneg, optimizer, sqrt, tensor_state
from optgen.ops import dtypes

narrow = Plan("Statistics in bf16.", reduced=floats.bf16)


@optimizer(cite="nobody")
def of_tensor(p, g, v=tensor_state(nonneg), *, lr=hyper(1e-3)):
    v = 0.9 * v + mean(g * g)
    p = p - lr * g / (sqrt(v) + 1)
    return p, v


def case():
    narrow.storage(of_tensor.states, dtypes.bf16, small=False)
