"""Functions of whole matrices: products and what is made of them.

No kernel computes them: what comes before is one sweep, what comes after another, and between the two torch multiplies.
The operand is rounded to bf16 on the way, in which the products are taken.
"""

from __future__ import annotations

from typing import Any

from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.lang.values import Num, Value, author_loc
from optgen.ops import spaces

JORDAN = (3.4445, -4.7750, 2.0315)
"""Coefficients whose fifth power series brings all singular values near 1 in five rounds (Jordan et al. 2024)."""


def newton_schulz(x: Num, steps: int = 5, coefficients: tuple[Num, Num, Num] = JORDAN, eps: Num = 1e-7) -> Any:
    """The orthogonal matrix nearest to x, nearly: x (rows, columns) with its singular values brought near 1.

    x, divided by its Frobenius norm (at least eps), goes `steps` times through a x + (b A + c A^2) x with A = x x', in
    bf16 (Jordan et al. 2024, as in torch.optim.Muon); more rows than columns are transposed first.
    """
    if isinstance(x, Value):
        if x.node.space != spaces.elem:
            raise UserError("E201", loc=author_loc(), function="newton_schulz", want="elem", got=x.node.space)
        operands = [v.node if isinstance(v, Value) else ir.const(v) for v in (steps, *coefficients, eps)]
        node = ir.op("call", x.node, *operands, attr="newton_schulz")
        if x.record is not None:
            x.record(node)
        return Value(node, x.record)
    own = getattr(type(x), "reader", None)
    if own is not None:
        return own.call(x)
    if type(x).__module__.startswith("torch"):
        return _on_tensors(x, int(steps), coefficients, eps)
    import sympy

    return sympy.Function("newton_schulz")(x)


def _on_tensors(x: Any, steps: int, coefficients: tuple[Num, Num, Num], eps: Num) -> Any:
    """newton_schulz of a torch tensor, in its dtype; of more than two dimensions, of the matrices of the last two."""
    import torch

    if x.ndim > 2:
        each = [_on_tensors(matrix, steps, coefficients, eps) for matrix in x.flatten(0, -3)]
        return torch.stack(each).view(x.shape) if each else x
    a, b, c = coefficients
    y = x.to(torch.bfloat16)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(x.dtype)
