"""Functions of whole matrices: products and what is made of them.

No kernel computes them: what comes before is one sweep, what comes after another, and between the two torch multiplies.
The operand is rounded to bf16 on the way, in which the products are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.lang.values import Num, Value, author_loc
from optgen.ops import spaces
from optgen.runtime.records import series

Triple = tuple[Num, Num, Num]


def newton_schulz(
    x: Num,
    steps: Num | None = None,
    coefficients: str | Num | Triple | Sequence[Triple] = series.JORDAN,
    eps: Num = 1e-7,
    *,
    normalize: bool = True,
    gram: Num = False,
) -> Any:
    """The orthogonal matrix nearest to x, nearly: x (rows, columns) with its singular values brought near 1.

    x, divided by its Frobenius norm (at least eps), goes `steps` times through a x + (b A + c A^2) x with A = x x', in
    bf16 (Jordan et al. 2024, as in torch.optim.Muon); more rows than columns are transposed first.

    steps         by default those of the set, or one for each triple, 5 for a single one
    coefficients  (a, b, c), a list of those of each round, of which the last goes on, or the name of a set
                  (runtime/records/series.py); or a hyper-parameter with series=True
    normalize     False: x has no singular value above 1 already
    gram          True: take products of the short side of x, in fp16: 4 instead of 10 of its long side in five rounds
    """
    usual, triples = (5, ((coefficients,),)) if isinstance(coefficients, Value) else _rounds(coefficients)
    by_gram = gram if isinstance(gram, Value) else float(gram)
    numbers = [usual if steps is None else steps, float(normalize), by_gram, eps, *(x for t in triples for x in t)]
    if isinstance(x, Value):
        if x.node.space != spaces.elem:
            raise UserError("E201", loc=author_loc(), function="newton_schulz", want="elem", got=x.node.space)
        operands = [v.node if isinstance(v, Value) else ir.const(v) for v in numbers]
        node = ir.op("call", x.node, *operands, attr="newton_schulz")
        if x.record is not None:
            x.record(node)
        return Value(node, x.record)
    own = getattr(type(x), "reader", None)
    if own is not None:
        return own.call(x)
    if type(x).__module__.startswith("torch"):
        from optgen.runtime.reference import matrices

        return matrices.newton_schulz(x, *numbers).to(x.dtype)
    import sympy

    return sympy.Function("newton_schulz")(x)


def _rounds(given: str | Triple | Sequence[Triple]) -> tuple[int, Sequence[Sequence[Num]]]:
    """Return the usual number of rounds and the triples of coefficients.  Raises UserError E113 for other forms."""
    try:
        return series.rounds(given, lambda x: None if isinstance(x, str) else x)
    except (TypeError, ValueError):
        what = f"newton_schulz() takes coefficients=(a, b, c), a list of such, or a name, got {given!r}"
        raise UserError("E113", loc=author_loc(), what=what, hint=", ".join(map(repr, series.SETS))) from None
