"""Three steps of a traced rule on small numbers, in fp64, which say where it first breaks.

As in a kernel, a host scalar or constant that is too small or too large for a normal number of fp32 becomes 0 or an
infinity where it meets other values: an eps of 1e-50 guards no division there, nor does a subnormal one in fast maths.

The parameter is a matrix of p in {0, 0.5} (rows) and g in {0, 0.001, -2} (columns), with hyper-parameters
at their defaults and states at their init; rules that reduce are also run on uniform tensors, such as a
bias that starts at zero.  Before that, a division by a bias correction is refused where some legal setting makes it 0,
and after it a division by 0 or a logarithm of 0 where p and g are far out: exp is 0, tanh and sigmoid constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from optgen.base.errors import UserError
from optgen.base.loc import Loc
from optgen.ir.node import Node, postorder
from optgen.ir.ranges import Intervals, corrections
from optgen.lang.declare import StateDecl
from optgen.lang.spec import Spec, Trace
from optgen.ops import dtypes, spaces
from optgen.ops.prims import PRIMS, REDUCTIONS

P = (0.0, 0.5)
G = (0.0, 1e-3, -2.0)
STEPS = 3
LATE = 10**6  # a step of a long training: what grows with t has overflowed by then
FAR = (-1e4, 1e4)  # p and g at which exp is 0, or tanh and sigmoid are -1, 0 or 1
Grid = tuple[tuple[float, float], ...]  # (p, g) of each element, row by row


def _div(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def _total(f: Callable[..., float]) -> Callable[..., float]:
    """f with IEEE results where Python raises."""

    def safe(*x: float) -> float:
        try:
            return float(f(*x))
        except OverflowError:
            return math.inf
        except (ValueError, ZeroDivisionError, TypeError):
            return math.nan

    return safe


def _power(a: float, b: float) -> float:
    return math.inf if a == 0 and b < 0 else _total(lambda x, y: x**y)(a, b)  # NaN for a complex number


def _propagating(pick: Callable[..., float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


_IEEE: dict[str, Callable[..., float]] = {
    "div": _div, "min": _propagating(min), "max": _propagating(max), "power": _power, "cast": lambda a: a,
    "pow": _total(lambda a, b: a**b), "rsqrt": lambda a: _div(1.0, _total(math.sqrt)(a)), "rcp": lambda a: _div(1.0, a),
    # Whole matrices are not what this looks at.
    **dict.fromkeys(("call", "transpose", "to_wide", "zero_product"), lambda a, *rest: a),
}  # fmt: skip
"""The meanings that differ from the row of the primitive: infinities and NaN where Python raises."""


@lru_cache
def _meaning(op: str) -> Callable[..., float]:
    """Return an operation on numbers, as IEEE has it."""
    row = PRIMS[op]
    meaning = _IEEE.get(op) or row.number or row.operator
    if meaning is None:
        raise NotImplementedError(f"the primitive {op} says no `number`: what it makes of Python's")
    return _total(meaning) if "f" in row.takes and op not in _IEEE else meaning


NodeValues = dict[int, list[float]]  # node uid -> value at each element


class ProbedTensor:
    """One tensor: its elements, and what every node is worth at each of them."""

    def __init__(self, grid: Grid, columns: int) -> None:
        self.grid = grid
        self.columns = columns
        self.size = len(grid)

    def entry(self, space: spaces.Space, i: int) -> int:
        """The number of an element's entry of a space."""
        return {"elem": i, "row": i // self.columns, "col": i % self.columns}.get(space.name, 0)

    def group(self, node: Node, i: int) -> list[int]:
        """The elements whose operand entries a reduction joins at element i, one for each entry."""
        first = {self.entry(node.args[0].space, j): j for j in reversed(range(self.size))}
        return [j for j in sorted(first.values()) if self.entry(node.space, j) == self.entry(node.space, i)]

    def leaf(self, node: Node, scalars: Mapping[str, float], kept: Mapping[str, list[float]]) -> list[float]:
        if node.op == "load":
            return kept[node.attr]
        if node.op == "sym":
            return [scalars[node.attr]] * self.size
        if node.op == "extent":
            rows = self.size // self.columns
            sizes = {"rows": rows, "columns": self.columns, "elements": self.size, "stream": 0}
            return [float(sizes[node.attr])] * self.size
        return [node.attr] * self.size

    def values(self, roots: list[Node], scalars: Mapping[str, float], kept: Mapping[str, list[float]]) -> NodeValues:
        out: NodeValues = {}
        for node in postorder(roots):
            if not node.args:
                out[node.uid] = self.leaf(node, scalars, kept)
            elif node.op == "matmul":
                out[node.uid] = out[max(node.args, key=lambda a: a.space == spaces.elem).uid]
            elif node.op in REDUCTIONS:
                pick = sum if REDUCTIONS[node.op][1] == "add" else max
                x = out[node.args[0].uid]
                out[node.uid] = [float(pick(x[j] for j in self.group(node, i))) for i in range(self.size)]
            else:
                columns = [[taken(node, a, x) for x in out[a.uid]] for a in node.args]
                out[node.uid] = [_meaning(node.op)(*x) for x in zip(*columns, strict=True)]
        return out


def taken(user: Node, operand: Node, x: float) -> float:
    """Return the value that an operation takes for one of its operands: 0 or an infinity beyond the normal numbers of
    fp32.

    A subnormal number is a number in strict maths; in fast maths it may count as 0.
    """
    if operand.space != spaces.host or user.space == spaces.host or operand.dtype is not dtypes.f32:
        return x
    if abs(x) < dtypes.f32.normal:
        return 0.0
    got = dtypes.in_f32(x)
    return got if math.isinf(got) else x


def _culprit(run: ProbedTensor, values: NodeValues, node: Node, i: int) -> tuple[Node, int]:
    """The operation that first made the value at element i not finite: all that it took was finite."""
    operand: tuple[Node, int] | None = (node, i)
    while operand is not None:
        node, i = operand
        if node.op == "where":
            sources = [(node.args[1 if values[node.args[0].uid][i] else 2], i)]
        elif node.op in REDUCTIONS:
            sources = [(node.args[0], j) for j in run.group(node, i)]
        else:
            sources = [(a, i) for a in node.args]
        operand = next(((a, j) for a, j in sources if not math.isfinite(values[a.uid][j])), None)
    return node, i


def _place(spec: Spec, trace: Trace, bad: Node, roots: list[Node]) -> Loc:
    """Return the place where the author made a value; of a number or a name, where it is first taken."""
    users = (n for n in postorder(roots) if bad is n or bad in n.args)
    return next((trace.places[n.uid] for n in users if n.uid in trace.places), spec.loc)


def host_values(spec: Spec, flags: Mapping[str, bool]) -> dict[str, float]:
    """The hyper-parameters' defaults, and 1/2 for those that a derived flag says are not zero."""
    out = {part: value for h in spec.hypers for part, value in zip(h.parts, h.values, strict=True)}
    for f in spec.flags:
        if f.nonzero is not None:
            out[f.nonzero] = (out[f.nonzero] or 0.5) if flags[f.name] else 0.0
    return out


def probe(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> None:
    """Raise UserError at the first operation that makes an infinity or NaN, or a nonneg state negative."""
    _corrections(spec, trace)
    for run, step, values in _walked(spec, flags, trace, range(1, STEPS + 1)):
        _judge(spec, trace, run, values, step)
    if _saturates(trace.new.values()):
        for run, step, values in _walked(spec, flags, trace, (1,), FAR, FAR):
            _judge(spec, trace, run, values, step, far=True)


def _saturates(nodes: Iterable[Node]) -> bool:
    return any(n.op in ("exp", "tanh", "sigmoid") for n in postorder(nodes))


def late(spec: Spec, flags: Mapping[str, bool], trace: Trace) -> tuple[str, float, Loc] | None:
    """Return the first new value that is no number at step LATE: (the weight or state, its value, where it is made).

    An infinity that only divides is none of it.
    """
    for run, step, values in _walked(spec, flags, trace, (*range(1, STEPS + 1), LATE)):
        if step == LATE:
            for node, i in _not_finite(trace, run, values):
                bad, j = _culprit(run, values, node, i)
                name = next(name for name, new in trace.new.items() if new is node)
                return name, values[bad.uid][j], _place(spec, trace, bad, list(trace.new.values()))
    return None


def _not_finite(trace: Trace, run: ProbedTensor, values: NodeValues) -> Iterator[tuple[Node, int]]:
    """The new values that are not finite at an element."""
    pairs = itertools.product(trace.new.values(), range(run.size))
    return ((node, i) for node, i in pairs if not math.isfinite(values[node.uid][i]))


def _walked(
    spec: Spec, flags: Mapping[str, bool], trace: Trace, steps: Iterable[int], ps: Sequence[float] = P,
    gs: Sequence[float] = G,
) -> Iterator[tuple[ProbedTensor, int, NodeValues]]:
    """Each tensor, and what every node is worth at each of the steps, one after the other."""
    roots = list(trace.new.values())
    full = tuple(itertools.product(ps, gs))
    reduces = any(n.op in REDUCTIONS for n in postorder(roots))
    for grid in (full, *((one,) for one in full)) if reduces else (full,):
        run = ProbedTensor(grid, min(len(gs), len(grid)))
        scalars = host_values(spec, flags) | {s.name: s.init for s in spec.present_host(flags)}
        kept = {"p": [p for p, _ in grid], "g": [g for _, g in grid]}
        kept |= {s.name: first_values(s, scalars, kept["p"]) for s in spec.present(flags)}
        for step in steps:
            values = run.values(roots, scalars | {"step": float(step)}, kept)
            yield run, step, values
            kept |= {name: values[node.uid] for name, node in trace.new.items()}
            scalars |= {name: kept[name][0] for name in trace.host_states}


def first_values(state: StateDecl, scalars: Mapping[str, float], p: list[float]) -> list[float]:
    """The values of a state before the first step, for each element."""
    if state.init == "param":
        return list(p)
    if state.space.name in spaces.MATRICES:
        return [1.0] * len(p)
    return [float(scalars[state.init] if isinstance(state.init, str) else state.init)] * len(p)


def _corrections(spec: Spec, trace: Trace) -> None:
    """Refuse a division by 1 - base**step of a base that may be 1: at every step that is a division by zero."""
    intervals = Intervals({part: h.interval for h in spec.hypers for part in h.parts} | {"step": (1.0, math.inf)})
    for node in postorder(trace.new.values()):
        if node.op != "div" or node.args[1].space != spaces.host:
            continue
        for correction in corrections(node.args[1]):
            base = correction.args[1].args[0]
            low, high = intervals(base)
            if low <= 1 <= high:
                name = str(base.attr) if base.op == "sym" else "the base of the power"
                raise UserError(
                    "E140", loc=trace.places.get(node.uid, spec.loc), value="x / 0", step=1,
                    note=f"{name} may be 1", hint="give the hyper-parameter an upper end below 1: lt=1",
                )  # fmt: skip


def _judge(spec: Spec, trace: Trace, run: ProbedTensor, values: NodeValues, step: int, far: bool = False) -> None:
    """Raise UserError E140 for a number that is not finite: of host scalars, computed in Python, in any branch."""
    roots = list(trace.new.values())
    hosts = [(n, 0) for n in postorder(roots) if n.space == spaces.host and not math.isfinite(values[n.uid][0])]
    if not hosts:
        _judge_signs(spec, trace, run, values, step)  # first, as the root of a negative state is NaN
    for node, i in hosts or _not_finite(trace, run, values):
        p, g = run.grid[i]
        bad, j = _culprit(run, values, node, i)
        if not far or any(values[a.uid][j] == 0 and _saturates([a]) for a in bad.args):
            place, value = _place(spec, trace, bad, roots), values[bad.uid][j]
            raise UserError("E140", loc=place, value=value, step=step, p=f"{p:g}", g=f"{g:g}")


def _judge_signs(spec: Spec, trace: Trace, run: ProbedTensor, values: NodeValues, step: int) -> None:
    """Raise UserError E142 for a nonneg state that is negative."""
    for s in spec.states:
        if s.nonneg and s.name in trace.states:
            for x, (p, g) in zip(values[trace.states[s.name].uid], run.grid, strict=True):
                if x < 0:
                    raise UserError("E142", loc=s.loc, name=s.name, value=f"{x:g}", step=step, p=f"{p:g}", g=f"{g:g}")
