from optgen.formats import Blocked, Plan
from optgen.lang import hyper, nonneg, optimizer, row, row_mean, sqrt
from optgen.ops import dtypes

rows_too = Plan("Rows in blocks.", overrides={"r": Blocked(8, 64)})


@optimizer(cite="nobody")
def by_row(p, g, r=row(nonneg), *, lr=hyper(1e-3)):
    r = 0.9 * r + row_mean(g * g)
    p = p - lr * g / (sqrt(r) + 1)
    return p, r


def case():
    rows_too.storage(by_row.states, dtypes.bf16, small=False)
