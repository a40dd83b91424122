from optgen.formats import Compander
from optgen.lang.values import Value
from optgen.ir import node as ir
from optgen.ops import dtypes, spaces

bent = Compander("bent", lambda n: n.clamp(0, 1), lambda y: y)


def case():
    bent.encode(Value(ir.load("m", dtypes.f32, spaces.elem)), 1.0, 127, signed=True)
