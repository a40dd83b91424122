"""Triton kernels: one launch per (plan, dtype) over all tensors.

A program walks the tiles of its work item.  A tile is `G` storage blocks of `B` elements (a flat run of
elements where nothing is stored in blocks): 256 elements, 8 per thread of one warp, so that bf16 moves in
128-bit and 8-bit codes in 64-bit accesses and no value crosses threads but in the block reductions.  Pairs of
full tiles are unmasked; what a tensor has behind them, and tensors whose rows end within a block, are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from optgen.backends.idioms import lanes, magnitude, printed
from optgen.backends.printer import ATOM, COMMON, Printer, Spelling, Text, function, number
from optgen.ir import node as ir
from optgen.ir.node import Node, postorder
from optgen.ir.program import Buffer, Let, Program, Schedule
from optgen.ir.ranges import Interval, Intervals
from optgen.ops import spaces
from optgen.ops.dtypes import DType

_TL: Mapping[str, str] = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "i32": "int32", "i16": "int16", "i8": "int8",
    "u8": "uint8", "u4": "uint8", "u2": "uint8", "u1": "uint8", "i64": "int64", "bool": "int1",
}  # fmt: skip


def tl_dtype(d: DType) -> str:
    return f"tl.{_TL[d.name]}"


class TritonPrinter(Printer):
    """A printer that knows the maths mode, intervals, and which space an operand is read in.

    A block's value has one dimension less than the elements.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(FAST if program.maths == "fast" else STRICT, {})
        self.program = program

    @cached_property
    def intervals(self) -> Intervals:
        """The ranges of the kernel's values."""
        return Intervals(scalar_ranges(self.program))

    def nonneg(self, node: Node) -> bool:
        return self.intervals(node)[0] >= 0

    def operand(self, user: Node, node: Node, level: int = 0) -> str:
        """An operand of `user`; a block's value beside elements is broadcast along the block."""
        if user.space == spaces.elem and node.space.name == "block":
            return f"beside({self.text(node)})"
        return self.text(node, level)

    def express(self, node: Node) -> Text:
        found = lanes(node) if node.uid not in self.names and self.program.maths == "fast" else None
        if found is None:
            return super().express(node)
        text = f"{found.helper}({', '.join([*map(self.text, found.args), *map(str, found.numbers)])})"
        return text, ATOM


def _limit(name: str) -> Spelling:
    """min and max; of floats, NaN if either is."""

    def spell(p: TritonPrinter, n: Node) -> Text:
        tail = ", propagate_nan=tl.PropagateNan.ALL" if n.dtype.is_float else ""
        return f"tl.{name}({', '.join(p.operand(n, a) for a in n.args)}{tail})", ATOM

    return spell


def _lshr(p: TritonPrinter, n: Node) -> Text:
    x, k = n.args
    if p.nonneg(x):
        return f"{p.text(x, 8)} >> {k.attr}", 8
    return f"({p.text(x, ATOM)}.to(tl.uint32, bitcast=True) >> {k.attr}).to(tl.int32, bitcast=True)", ATOM


def _table(p: TritonPrinter, n: Node) -> Text:
    at = f", {n.op}_{n.attr}_ptr" if _is_long(n) else ""
    return f"table_{n.op}_{n.attr}({p.text(n.args[0])}{at})", ATOM


def _draw(_: Printer, n: Node) -> Text:
    kind, bits, width = n.attr
    return f"{kind}(draws, SHIFT, {bits}{f', {width}' if kind != 'integer' else ''})", ATOM


LONGEST = 32
"""Numbers of the longest table that is a tree of selections in a kernel's text; longer ones lie in memory."""

SELECTED = 3
"""Levels of the tree of a search in memory that are selections all the same: seven numbers cost less than loads."""


def _is_long(n: Node) -> bool:
    return len(n.attr.values) > LONGEST


def _looks_up(programs: Sequence[Program]) -> list[Node]:
    """A node for each table that is looked up or searched in these programs."""
    nodes = [n for p in programs for n in postorder(p.roots()) if n.op in ("lookup", "search")]
    return [n for _, n in sorted({(n.op, str(n.attr)): n for n in nodes}.items())]


def in_memory(programs: Sequence[Program]) -> dict[str, tuple[float, ...]]:
    """The tables that kernels read from memory: their names, and the numbers as they lie there.

    Of a search the levels of the tree, the lowest and longest first, without the SELECTED highest ones: a level of 32
    numbers or fewer is then in the same 128 bytes, which a warp reads at a time, the lowest of 8 in four times as many.
    """
    found = {}
    for n in [n for n in _looks_up(programs) if _is_long(n)]:
        values: tuple[float, ...] = n.attr.values
        if n.op == "search":
            depth = len(values).bit_length()
            values = tuple(x for k in range(depth - SELECTED) for x in values[(1 << k) - 1 :: 2 << k])
        found[f"{n.op}_{n.attr}"] = values
    return found


def tables(program: Program) -> list[str]:
    """A function for each table that the program looks things up in: trees of selections, one level for each bit; where
    they are long, loads."""
    out = []
    for n in _looks_up([program]):
        values, parameters = [number(ir.const(x)) for x in n.attr.values], "x, table" if _is_long(n) else "x"
        body = _lookup(values, _is_long(n)) if n.op == "lookup" else _search(values, _is_long(n))
        out += ["@triton.jit", f"def table_{n.op}_{n.attr}({parameters}):", *body, "", ""]
    return out


def _lookup(values: list[str], in_memory: bool) -> list[str]:
    doc = f'    """float32: entry number x of {len(values)}'
    if in_memory:
        return [f'{doc}."""', "    return tl.load(table + x)"]
    depth = (len(values) - 1).bit_length()
    bits = [f"    b{k} = (x & {1 << k}) != 0" for k in range(depth)]
    padded = values + values[-1:] * ((1 << depth) - len(values))
    tree = _tree(padded, [f"b{k}" for k in reversed(range(depth))])
    return [f'{doc}; a bit of x for each level of the tree."""', *bits, f"    return {tree}"]


def _search(values: list[str], in_memory: bool) -> list[str]:
    depth = len(values).bit_length()
    lowest = depth - SELECTED if in_memory else 0
    out = [f'    """int32: how many of {len(values)} numbers are <= x, found bit by bit."""']
    for k in reversed(range(lowest, depth)):
        above = [f"b{i}" for i in reversed(range(k + 1, depth))]
        out.append(f"    b{k} = x >= {_tree(values[(1 << k) - 1 :: 2 << k], above)}")
    words = [f"tl.where(b{k}, {1 << k - lowest}, 0)" for k in range(lowest, depth)]
    if not in_memory:
        return [*out, f"    return {' | '.join(words)}"]
    out.append(f"    found = {' | '.join(reversed(words))}")
    for level in range(SELECTED, depth):  # as `in_memory` lays them out
        start = (1 << depth) - (2 << level)
        at = f"table + {start} + found" if start else "table + found"
        out.append(f"    found = found * 2 + (x >= tl.load({at})).to(tl.int32)")
    return [*out, "    return found"]


def _tree(values: Sequence[str], bits: Sequence[str]) -> str:
    """The value whose number has these bits, the highest first; `values` are two to the number of bits."""
    if not bits:
        return values[0]
    half = len(values) // 2
    return f"tl.where({bits[0]}, {_tree(values[half:], bits[1:])}, {_tree(values[:half], bits[1:])})"


def _neg(p: TritonPrinter, n: Node) -> Text:
    """-x; of floats by a helper, because Triton's own is 0 - x, which is +0 for +0 and an instruction."""
    (x,) = n.args
    return (f"minus({p.text(x)})", ATOM) if n.dtype.is_float else (f"-{p.text(x, 30)}", 30)


def _rcp(p: TritonPrinter, n: Node) -> Text:
    """1 / b: the square of a reciprocal root where b >= 0 (3 instructions; the approximate division is 8)."""
    (b,) = n.args
    if n.space.name == "block":
        return f"inverse({p.text(b)})", ATOM
    if p.nonneg(b) and n.space == spaces.elem:
        if b.op == "sqrt" and b.uid not in p.names:  # one instruction of the slow pipe instead of two
            return f"tl.rsqrt({p.text(b.args[0])})", ATOM
        return f"reciprocal({p.text(b)})", ATOM
    return f"1.0 / {p.text(b, 21)}", 20


def _block_limit(p: TritonPrinter, n: Node) -> Text:
    """Magnitudes are compared as floats, whose operands take |x| for nothing and whose limits leave out NaN."""
    x = magnitude(n)
    helper = n.op if x is None else "block_magnitude" if n.op == "block_max" else "block_least"
    return f"{helper}({p.text(x or n.args[0])}, live, MASKED)", ATOM


_COMMON: dict[str, Spelling] = {
    **COMMON,
    "extent": lambda p, n: (f"extent_{n.attr}", ATOM),
    "draw": _draw,
    "neg": _neg,
    "abs": function("tl.abs"),
    "min": _limit("minimum"),
    "max": _limit("maximum"),
    "fma": function("tl.fma"),
    "where": function("tl.where"),
    "sign": function("sign"),
    "lshr": _lshr,
    "cast": lambda p, n: (f"{p.text(n.args[0], ATOM)}.to({tl_dtype(n.dtype)})", ATOM),
    "bitcast": lambda p, n: (f"{p.text(n.args[0], ATOM)}.to({tl_dtype(n.dtype)}, bitcast=True)", ATOM),
    "narrow": lambda p, n: (f'narrow({", ".join(map(p.text, n.args))}, "{n.attr}")', ATOM),
    "rint": function("rint"),
    "floor": function("floor"),
    "lookup": _table,
    "search": _table,
    "block_max": function("block_max", ", live, MASKED"),
    "block_min": function("block_min", ", live, MASKED"),
}

STRICT: dict[str, Spelling] = _COMMON | {"div": function("tl.div_rn"), "sqrt": function("tl.sqrt_rn")}
FAST: dict[str, Spelling] = _COMMON | {"rcp": _rcp, "sqrt": function("tl.sqrt")}
FAST |= {"block_max": _block_limit, "block_min": _block_limit}


# Of a kernel that is launched.  Triton would compile it a second time for the keys that 16 divides, and these come: the
# lowest bits of a key are the place in its window, so that the very first step has one and the second has none.
ENTRY = '@triton.jit(do_not_specialize=["step_key"])'


@dataclass(frozen=True)
class Term:
    """A term that a sweep adds up, or takes the largest of: the operand of one or more reductions.

    node      its value
    partials  the buffers of the reductions
    factors   in fast maths the two factors of a product that only sums read: it is computed with them
    """

    node: Node
    partials: tuple[Buffer, ...]
    factors: tuple[Node, ...] = ()

    @property
    def is_max(self) -> bool:
        return self.partials[0].reduction.endswith("max")

    @property
    def kind(self) -> str:
        """Return the kind of reduction, as the record of a sweep spells it (optgen.runtime.gpu.walk)."""
        if self.factors:
            return "square" if self.factors[0] is self.factors[1] else "product"
        return "max" if self.is_max else "sum"

    @property
    def parts(self) -> tuple[Node, ...]:
        """The values that a tile function gives."""
        if not self.factors:
            return (self.node,)
        one, other = self.factors
        return (one,) if one is other else (one, other)


def terms(schedule: Schedule) -> list[Term]:
    """The operands of the sweep's reductions, each once."""
    program, found = schedule.program, dict[tuple[Node, bool], list[Buffer]]()
    others = []
    for s in schedule.sweep.stores:
        b = program.buffer(s.buffer)
        if b.role != "partial":
            others.append(s.node)
        elif b.space != spaces.model:  # which the host adds up
            found.setdefault((s.node, b.reduction.endswith("max")), []).append(b)
    read = {a for n in postorder([s.node for s in schedule.sweep.stores]) for a in n.args} | {*others}

    def factors(node: Node, is_max: bool) -> tuple[Node, ...]:
        splits = program.maths == "fast" and node.op == "mul" and node not in read and not is_max
        return node.args if splits and all(x.space == spaces.elem for x in node.args) else ()

    return [Term(node, tuple(buffers), factors(node, is_max)) for (node, is_max), buffers in found.items()]


def _printed_roots(schedule: Schedule) -> list[Node]:
    """Return the values that a tile function stores or returns."""
    program = schedule.program
    stored = [s.node for s in schedule.sweep.stores if program.buffer(s.buffer).role != "partial"]
    return [*stored, *(node for t in terms(schedule) for node in t.parts)]


def printed_lets(schedule: Schedule) -> tuple[Let, ...]:
    """The lets that something reads."""
    sweep = schedule.sweep
    if schedule.program.maths == "strict":
        return sweep.lets
    read = {n.uid for n in printed(_printed_roots(schedule))}
    return tuple(let for let in sweep.lets if let.node.uid in read)


def scalar_ranges(program: Program) -> dict[str, Interval]:
    """Intervals of the kernel's scalars, from the hyper-parameters' ranges through the host lets."""
    known: dict[str, Interval] = dict(program.ranges)
    for let in program.host:
        if let.node.op != "sym":
            known[let.name] = Intervals(known)(let.node)
    return known


# What a kernel names itself: a scalar of that name is spelled with an underscore there.
LOCALS = frozenset(
    "walk walk_panels walk_any rounds SWEEP LEVEL table work item row rows columns first end "
    "at live at_mat lane number start group extent_rows extent_columns extent_elements".split()
)


def scalars(program: Program) -> list[str]:
    """The host scalars as a kernel names its arguments."""
    return [f"{let.name}_" if let.name in LOCALS else let.name for let in program.host]


def as_tuple(names: Sequence[str]) -> str:
    """A tuple of these names."""
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def in_tuple(items: Sequence[str]) -> list[str]:
    """The items of a tuple with its parentheses, for a line to end between two of them."""
    if len(items) < 2:
        return [as_tuple(items)]
    return [f"({items[0]}", *items[1:-1], f"{items[-1]})"]


def sizes(program: Program) -> dict[str, int]:
    """The sizes of the logical tensor that the program computes with: their place behind those of where it lies."""
    wanted = {n.attr for n in postorder(program.roots()) if n.op == "extent"}
    return {x: k for k, x in enumerate(("rows", "columns", "elements")) if x in wanted}
