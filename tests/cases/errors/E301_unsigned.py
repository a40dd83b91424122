from optgen.formats import Blocked, Plan, linear
from optgen.lang import hyper, optimizer, state
from optgen.ops import dtypes

all_root = Plan("Roots everywhere.", nonneg=Blocked(8, 64, linear, signed=False))
wrong = all_root.but(overrides={"m": all_root.nonneg})


@optimizer(cite="nobody")
def heavy(p, g, m=state(), *, lr=hyper(1e-3)):
    m = 0.9 * m + g
    p = p - lr * m
    return p, m


def case():
    wrong.storage(heavy.states, dtypes.bf16, small=False)
