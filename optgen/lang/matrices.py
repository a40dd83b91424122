"""Functions of whole matrices: products and what is made of them.

No kernel computes them: what comes before is one sweep, what comes after another, and between the two torch multiplies,
in fp32.  newton_schulz takes its products in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from optgen.base.errors import UserError
from optgen.ir import node as ir
from optgen.lang.values import Absent, Num, Value, author_loc, lift, reader_of, where
from optgen.ops import spaces
from optgen.runtime.records import keys, series

Triple = tuple[Num, Num, Num]

CHECKED: ContextVar[bool] = ContextVar("CHECKED", default=False)
"""True while a rule is checked on random matrices: what reads one half of a matrix refuses others."""

HALVES = ("eigenvectors", "inverse_root", "norm_lower_bound", "orthogonal_iteration", "solve_triangular")
"""Functions that read one half of a matrix alone, as of a symmetric or a triangular one."""


def newton_schulz(
    x: Num,
    steps: Num | None = None,
    coefficients: str | Num | Triple | Sequence[Triple] = series.JORDAN,
    eps: Num = 1e-7,
    *,
    normalize: bool = True,
    part: Num | None = None,
) -> Any:
    """The orthogonal matrix nearest to x, nearly: x (rows, columns) with its singular values brought near 1.

    x, divided by its Frobenius norm (at least eps), goes `steps` times through a x + (b A + c A^2) x with A = x x', in
    bf16 (Jordan et al. 2024, as in torch.optim.Muon); more rows than columns are transposed first.

    steps         by default those of the set, or one for each triple, 5 for a single one
    coefficients  (a, b, c), a list of those of each round, of which the last goes on, or the name of a set
                  (runtime/records/series.py); or a hyper-parameter with series=True
    normalize     False: x has no singular value above 1 already
    part          x = top_rows(y, part): take products of these rows alone
    """
    usual, triples = (5, ((coefficients,),)) if isinstance(coefficients, Value) else _rounds(coefficients)
    numbers = [usual if steps is None else steps, float(normalize), eps, *(x for t in triples for x in t)]
    if part is not None:
        return _call("newton_schulz_of_rows", (x,), [part, *numbers])
    return _call("newton_schulz", (x,), numbers)


def top_rows(x: Num, fraction: Num) -> Any:
    """x with zeros outside of a fraction of its rows, or of its columns where there are fewer.

    fraction   above 0; of n rows it takes fraction * n, rounded up, those with the largest sums of magnitudes
    """
    if isinstance(fraction, (int, float)) and not 0 < fraction <= 1:
        what = f"top_rows() takes a fraction above 0 and up to 1, got {fraction!r}"
        raise UserError("E113", loc=author_loc(), what=what, hint="hyper(0.25, gt=0, le=1) is one")
    return _call("top_rows", (x,), (fraction,))


def transpose(x: Num) -> Any:
    """x.T: rows and columns changed over."""
    if isinstance(x, Value):
        return x.T
    return x.mT if hasattr(x, "mT") else x


def gram(x: Num) -> Any:
    """x @ x.T: the inner products of the rows of x."""
    return x @ transpose(x)


def orthogonal_iteration(x: Num, basis: Num, known: Num | None = None) -> Any:
    """qr(x @ basis), one step nearer to the eigenvectors of a symmetric x.

    known  a condition of the host, such as t > 1: where it does not hold, there is no basis yet, and the result is the
           eigenvectors themselves
    """
    return _call("orthogonal_iteration", (x, basis if known is None else where(known, 1.0, 0.0) * basis))


def inverse_root(x: Num, p: Num, eps: Num = 0.0) -> Any:
    """(x + eps I) ** (-1 / p) of a symmetric x of no negative eigenvalue; those that rounding makes so count as 0.

    p    above 0
    eps  relative to the largest eigenvalue; raise it where x may be singular
    """
    return _call("inverse_root", (x,), (p, eps))


def bjorck(x: Num, steps: Num = 1) -> Any:
    """An x that is nearly orthogonal, nearer: rounds of 1.5 x - .5 x x' x in fp32 (Bjorck & Bowie 1971).

    Takes a singular value 1 - d to 1 - 1.5 d^2 + .5 d^3: those below sqrt(3) go to 1, larger ones to infinity.
    """
    return _call("bjorck", (x,), (steps,))


def solve_triangular(b: Num, a: Num, *, upper: bool = True) -> Any:
    """The solution x of a @ x = b for a triangular a; of the shape of b."""
    return _call("solve_triangular", (b, a), (float(upper),))


def _function(name: str, doc: str) -> Callable[[Num], Any]:
    """Return the function of that name of one matrix."""

    def function(x: Num) -> Any:
        return _call(name, (x,))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


qr = _function("qr", "The orthogonal factor of x = q r, whose columns span, from left to right, what those of x do.")
eigenvectors = _function(
    "eigenvectors", "The eigenvectors of a symmetric x, as columns, those of the largest eigenvalues first."
)
sorting = _function("sorting", "The permutation matrix s for which s.T @ x @ s has its diagonal in falling order.")
triangle = _function("triangle", "x with zeros below its diagonal.")
norm_lower_bound = _function(
    "norm_lower_bound",
    "A lower bound of the spectral norm of a symmetric x, usually above 0.7 of it, in every place of its shape.",
)
identity = _function("identity", "The identity matrix of the shape of a square x.")


def trace(x: Num) -> Any:
    """The sum of the diagonal, one value for each matrix."""
    return reader_of(x).mat_sum(x * _call("identity", (x,), said="trace"))


def wide(x: Num) -> Any:
    """x or x.T, the one with more columns than rows (x.T where they are as many): (shorter side, longer side)."""
    if isinstance(x, Value):
        if x.node.space != spaces.elem:
            raise UserError("E201", loc=author_loc(), function="wide", want="elem", got=spaces.shown(x.node.space))
        return _recorded(ir.op("to_wide", x.node), x)
    shape = getattr(x, "shape", (0, 1))
    return x if shape[-2] < shape[-1] else transpose(x)


def unwide(like: Num, x: Num) -> Any:
    """The inverse of `wide`: a (shorter side, longer side) x in the shape of `like`, which is one of elements."""
    return _call("unwide", (like, x))


def zero_product(a: Num, b: Num) -> Any:
    """Zeros in the shape of a @ b."""
    return reader_of(a, b).zero_product(a, b) if isinstance(a, Value) else a @ b * 0


def singular_vectors(like: Num, x: Num) -> Any:
    """The left singular vectors of x for its largest singular values, as columns: as many as `like` has columns.

    Of the two signs of each it is the one whose entry of largest magnitude is positive.  NaN where x is not finite.
    """
    return _call("singular_vectors", (like, x))


def column_norms(like: Num, x: Num) -> Any:
    """The Euclidean norm of each column of x, in every row of the shape of `like`."""
    return _call("column_norms", (like, x))


def finite(x: Num, other: Num = 0.0) -> Any:
    """x, but `other` in place of a matrix that has a NaN or an infinity, of which the step warns once.

    other  a matrix of the shape of x, such as the one of the step before, or a number
    """
    both = isinstance(other, Value) and spaces.dims(other.node.space)
    return _call("finite", (x, other) if both else (x,), () if both else (other,))


def normal(like: Num, key: Num) -> Any:
    """Standard normal random numbers in the shape of `like`, the same for the same parameter, place and key.

    key   a whole number, such as that of the step; the numbers depend on it and on the parameter's name (its position
          where it has none) alone: not on the device, the ranks, or other parameters
    """
    if isinstance(key, str):
        hint = "normal(like, key) is of whole matrices; rows and elements have none of their own"
        want = "a whole number as its key"
        raise UserError("E103", loc=author_loc(), function="normal()", want=want, got=repr(key), hint=hint)
    stream: Any = keys.stream_key(0)  # of tensors: that of a parameter without a name, the first of its optimizer
    if isinstance(like, Value):
        stream = Value(ir.extent("stream"), like.record)
    elif type(like).__module__.startswith("torch"):
        from optgen.runtime.reference import matrices

        stream = matrices.streams(stream, like.shape[:-2], like.device)
    return _call("normal", (like,), (key, stream))


def _recorded(node: ir.Node, x: Value) -> Value:
    return Value(x.record(node) if x.record else node, x.record)


_SQUARE, _HINT = "a square matrix", "x @ x.T and x.T @ x are square"
_OF_SQUARES = "eigenvectors sorting inverse_root triangle identity norm_lower_bound".split()
_FITS: dict[str, tuple[Callable[..., bool], str, str]] = {
    **dict.fromkeys(_OF_SQUARES, (lambda x: x[0] == x[1], _SQUARE, _HINT)),
    "qr": (
        lambda x: x[0] == x[1] or x[1] == "r" or x == "ls", "a matrix that never has more columns than rows", _HINT,
    ),
    "solve_triangular": (lambda b, a: a == 2 * b[0], f"{_SQUARE} of as many rows as its first operand", _HINT),
    "singular_vectors": (
        lambda like, x: like[0] == x[0] and (like[1] == "r" or like in ("ss", x) and like[0] == like[1]),
        "a basis (d, rank) and a matrix of d rows", 'low_rank_state("short", ...) is a basis of wide(x)',
    ),
    "finite": (lambda x, other="": other in ("", x), "two matrices of one shape", _HINT),
}  # fmt: skip
"""Function of whole matrices -> a test of the dimensions of its matrices, what it wants, and a hint."""


def _check_shapes(name: str, nodes: Sequence[ir.Node], said: str) -> None:
    """Raise UserError E201 for operands that are no matrices, and E206 for matrices of other shapes than it takes."""
    dims = [spaces.dims(node.space) for node in nodes]
    if not all(dims):
        space = nodes[dims.index("")].space
        raise UserError("E201", loc=author_loc(), function=said, want="elem or matrix", got=space)
    fits, want, hint = _FITS.get(name, (None, "", ""))
    if fits is not None and not fits(*dims):
        got = " and ".join(spaces.shown(node.space) for node in nodes)
        raise UserError("E206", loc=author_loc(), function=f"{said}()", want=want, got=got, hint=hint)


def _call(name: str, operands: tuple[Num, ...], numbers: Sequence[Num] = (), said: str = "") -> Any:
    """A function of whole matrices, then of host scalars, on whatever its first operand is; errors call it `said`."""
    (x, *_) = operands
    if isinstance(x, Value):
        nodes = [lift(operand) for operand in operands]
        _check_shapes(name, nodes, said or name)
        return _recorded(ir.op("call", *nodes, *map(lift, numbers), attr=name), x)
    reader = getattr(type(x), "reader", None)
    if reader is not None or isinstance(x, Absent):
        return reader_of(x).call(x)
    if type(x).__module__.startswith("torch"):
        from optgen.runtime.reference import matrices

        if CHECKED.get() and name in HALVES:
            _check_half(name, operands, numbers)
        return getattr(matrices, name)(*operands, *numbers).to(x.dtype).as_subclass(type(x))
    import sympy

    return sympy.Function(name)(x)


def _check_half(name: str, operands: tuple[Any, ...], numbers: Sequence[Any]) -> None:
    """Raise UserError E129 for a matrix of which the half that is not read differs."""
    x = operands[name == "solve_triangular"]
    lacks = x - x.mT if x is operands[0] else x.tril(-1) if numbers[0] else x.triu(1)
    if lacks.abs().max() > 1e-6 * x.abs().max():
        why = "it reads one half of its operand, and the other one differs"
        remedy = "(x + x.T) / 2 is symmetric, as is gram(x), and triangle(x) is upper triangular"
        raise UserError("E129", loc=author_loc(), function=f"{name}()", why=why, remedy=remedy)


def _rounds(given: str | Triple | Sequence[Triple]) -> tuple[int, Sequence[Sequence[Num]]]:
    """Return the usual number of rounds and the triples of coefficients.  Raises UserError E113 for other forms."""
    try:
        return series.rounds(given, lambda x: None if isinstance(x, str) else x)
    except ValueError:
        what = f"newton_schulz() takes coefficients=(a, b, c), a list of such, or a name, got {given!r}"
        raise UserError("E113", loc=author_loc(), what=what, hint=", ".join(map(repr, series.SETS))) from None
