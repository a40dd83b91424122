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

Triple = tuple[Num, Num, Num]

_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
JORDAN = (3.4445, -4.7750, 2.0315)
SETS: dict[str, tuple[int, tuple[Triple, ...]]] = {
    "jordan": (5, (JORDAN,)),
    "polar_express": (5, (*((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _EXPRESS), (1.875, -1.25, 0.375))),
    "deepseek": (10, (*8 * (JORDAN,), (2.0, -1.5, 0.5))),
    "cubic": (10, ((1.5, -0.5, 0.0),)),
}
"""Rounds as usual, and coefficients: of the series that brings all singular values near 1 in five rounds (Jordan et al.
2024); of the best one for each round, with the authors' margin for bf16 (Amsel et al. 2025, arXiv:2505.16932); eight
rounds of the first and two that converge; Newton and Schulz's own."""


def newton_schulz(
    x: Num,
    steps: Num | None = None,
    coefficients: str | Triple | Sequence[Triple] = JORDAN,
    eps: Num = 1e-7,
    *,
    normalize: bool = True,
    gram: bool = False,
) -> Any:
    """The orthogonal matrix nearest to x, nearly: x (rows, columns) with its singular values brought near 1.

    x, divided by its Frobenius norm (at least eps), goes `steps` times through a x + (b A + c A^2) x with A = x x', in
    bf16 (Jordan et al. 2024, as in torch.optim.Muon); more rows than columns are transposed first.

    steps         by default those of the set, or one for each triple, 5 for a single one
    coefficients  (a, b, c), a list of those of each round, of which the last goes on, or the name of a set in SETS
    normalize     False: x has no singular value above 1 already
    gram          True: take products of the short side of x, in fp16: 4 instead of 10 of its long side in five rounds
    """
    usual, triples = _rounds(coefficients)
    numbers = [usual if steps is None else steps, float(normalize), float(gram), eps, *(x for t in triples for x in t)]
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


def _rounds(coefficients: str | Triple | Sequence[Triple]) -> tuple[int, Sequence[Triple]]:
    """Return the usual number of rounds and the triples of coefficients.  Raises UserError E113 for other forms."""
    if isinstance(coefficients, str) and coefficients in SETS:
        return SETS[coefficients]
    given: Any = coefficients
    if not isinstance(given, str) and len(given) == 3 and not isinstance(given[0], Sequence):
        return 5, (given,)
    if isinstance(given, str) or not given or any(not isinstance(t, Sequence) or len(t) != 3 for t in given):
        what = f"newton_schulz() takes coefficients=(a, b, c), a list of such, or a name, got {given!r}"
        raise UserError("E113", loc=author_loc(), what=what, hint=", ".join(map(repr, SETS)))
    return len(given) if len(given) > 1 else 5, given
