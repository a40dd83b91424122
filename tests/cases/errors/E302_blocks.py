from optgen.formats import Blocked, LogMinMax, Plan
from optgen.ops import dtypes
from specs.adamw import adamw

uneven = Plan("Two block sizes.", signed=Blocked(8, 64), nonneg=LogMinMax(8, 32))


def case():
    uneven.storage(adamw.present(adamw.settings()[0]), dtypes.bf16, small=False)
