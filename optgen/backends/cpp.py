"""C++ kernels for CPUs: one call per (group, plan, dtype of weights) over all its tensors.

A tile is a multiple of 16 storage blocks (a run of elements where nothing is stored in blocks).  A
reduction over a block cuts the work on a tile in two: *phase* k reads what the reductions of the phases before
it found.  Between two phases stands a stage for the blocks' own values, 16 blocks to a vector; a value that a
later phase reads again is kept in an array on the stack, which the first-level cache holds.  How a weight is kept is
a struct of its own (`weight`), and a kernel a template over it; random bits are dealt out by the header.

The text is written over the vector types of `optgen.h`: F, I and M, whose width is the machine's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, mul, sub, truediv

from optgen.backends.idioms import idiom
from optgen.backends.printer import (
    ATOM,
    Printer,
    Spelling,
    Text,
    comment_of,
    taken_away,
    whole,
    with_comments,
    with_more,
    wrapped,
)
from optgen.ir.node import Node, is_const, postorder
from optgen.ir.program import Buffer, Let, Program, Schedule, Store
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import GATHERS
from optgen.ops.spaces import Space

BLOCKS = 16  # storage blocks per tile where a step takes several kernels: one vector of their values
FLAT = 1024  # elements per tile where nothing is stored in blocks
NAN = 0x7FC00000  # f32, without a payload
WORTH = 6  # operations from which on a loop of their own pays

_TYPE: Mapping[str, str] = {"f32": "F", "bool": "M"}  # all else is whole numbers, or bits, in an I
KEPT: Mapping[str, str] = {"F": "float", "I": "int32_t", "M": "int32_t"}
STORED: Mapping[str, str] = {
    "f32": "float", "bf16": "uint16_t", "f16": "uint16_t", "i32": "int32_t", "i16": "int16_t", "i8": "int8_t",
    "u8": "uint8_t", "u4": "uint8_t", "u2": "uint8_t", "u1": "uint8_t",
}  # fmt: skip
# What the printed functions name themselves, call or receive, and C++'s own words.
RESERVED = frozenset(
    "abs across ahead alignas alignof and and_eq apart as_float asm at auto b bfloat16 bitand bitor bits "
    "bits_or_nan BLOCK BLOCKS blocks bool break bytes_of_lanes case catch char char16_t char32_t char8_t "
    "class co_await co_return co_yield Column COLUMNS Columns columns compl concept const const_cast "
    "consteval constexpr constinit continue count counter Dealt dealt decltype decode default delete do "
    "double DRAWN dynamic_cast elements_of_tile else encode end enum explicit export extend16 extern F false "
    "fetch fill fill_first first float float16 float32 floor fma for fraction friend gather goto Grad halves "
    "halves_of_lanes I i I16 if INFINITY inline int int16_t INT32_MAX INT32_MIN int32_t int64_t int8_t "
    "integer iota joined k KEPT lane Larger larger largest live load long lookup low16 lshr M mask max "
    "maximum memcpy memset middle min minimum mutable namespace NAN narrow narrow_half new no_codes noexcept "
    "NOISE Noise noise not not_eq NULL nullptr operator OPTGEN_EXPORT OPTGEN_GRAD OPTGEN_KERNEL OPTGEN_L1 "
    "optgen_layout OPTGEN_ONCE OPTGEN_SIMD OPTGEN_STAMP optgen_stamp optgen_step or or_eq P pack Part PARTS "
    "parts PLACE private protected public RAGGED ramp raw read_row register reinterpret_cast requires return "
    "rint rotl run SCALARS scalars search SHARE Share short sign signed sizeof Smaller smaller smallest "
    "spread sqrt staged static static_assert static_cast step_key store store_byte store_half stream_key "
    "struct switch template Tensor this thread_local throw TILE tile to_float to_int true try "
    "typedef typeid typename U16 U8 uint16_t uint8_t union unpack unsigned update_weight using V4d V4f V4i "
    "V4u virtual void volatile W walk Want wchar_t Weight weight weight_float32 where while widen widen_half "
    "widened width Word Words words xor xor_eq".split()
)


# What one load brings, before it is widened: a number of its own bytes for each lane.
_RAW: Mapping[str, str] = {"u8": "U8", "u4": "U8", "u2": "U8", "u1": "U8", "bf16": "U16", "f16": "U16", "i16": "I16"}


def type_of(dtype: DType) -> str:
    return _TYPE.get(dtype.name, "I")


def literal(value: float | int | bool) -> str:
    """Return a constant as C++ text, of its exact f32 value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "INT32_MIN" if value == -(2**31) else whole(value)
    value = dtypes.in_f32(value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}f"


# C++'s precedence differs from Python's in comparisons, which bind tighter than &, ^ and | there.
_INFIX: Mapping[str, tuple[str, int]] = {
    "mul": ("*", 20), "add": ("+", 10), "sub": ("-", 10), "shl": ("<<", 8), "shr": (">>", 8), "lt": ("<", 7),
    "le": ("<=", 7), "eq": ("==", 6), "ne": ("!=", 6), "and": ("&", 5), "xor": ("^", 4), "or": ("|", 3),
    "div": ("/", 20),
}  # fmt: skip


_SAID = frozenset({"widened", "joined", "counter"})
"""The idioms that the headers have functions for; the others are Triton's."""


class CppPrinter(Printer):
    """The printer of C++ expressions, which knows what stays as it was loaded."""

    def __init__(self, phases: Phases) -> None:
        super().__init__(SPELL, dict(phases.head))
        self.phases, self.raw = phases, phases.raw

    def express(self, node: Node) -> Text:
        """An idiom where what it reads is as it was loaded."""
        found = idiom(node) if node.uid not in self.names else None
        if found is None or self.phases.operands(node) is node.args:
            return super().express(node)
        text = f"{found.helper}({', '.join(self.text(a) for a in found.args)})"
        if found.plus:
            return with_more(text, literal(found.plus)), 10
        return text, ATOM


def _infix(p: Printer, n: Node) -> Text:
    sign, level = _INFIX[n.op]
    a, b = n.args
    if n.op == "add" and b.op == "const" and _apart(p, a, b.attr):
        sign, level = _INFIX["or"]  # masked and put together in one instruction, where there is one for three operands
    if a.op == "const" and b.op == "const":  # neither is a vector: nothing to overload the operator
        return f"{type_of(a.dtype)}({literal(a.attr)}) {sign} {p.text(b, level + 1)}", level
    less = taken_away(n) if sign == "+" else None
    shown = f"- {p.text(less)}" if less is not None else f"{sign} {p.text(b, level + 1)}"
    return f"{p.text(a, level)} {shown}", level


def _apart(p: Printer, n: Node, plus: int) -> bool:
    """Return True if n has no bit of `plus` where it is written, so that their sum is their union."""
    if n.op == "draw":
        return n.attr[0] == "integer" and not plus & ((1 << n.attr[1]) - 1)
    return n.op == "and" and n.uid not in p.names and n.args[1].op == "const" and not n.args[1].attr & plus


def _mul(p: Printer, n: Node) -> Text:
    """Spell a product; that with a reciprocal is a division: the divider works beside the other pipes.

    Estimates with a Newton step, for one or for all of a phase's four, were 5 to 12 % slower (Zen 4, both widths).
    """
    for x, y in (n.args, n.args[::-1]):
        if y.op == "rcp" and y.uid not in p.names:
            return f"{p.text(x, 20)} / {p.text(y.args[0], 21)}", 20
    return _infix(p, n)


def _rcp(p: Printer, n: Node) -> Text:
    return f"1.0f / {p.text(n.args[0], 21)}", 20


def _call(name: str) -> Spelling:
    return lambda p, n: p.call(name, *n.args)


def _const(p: Printer, n: Node) -> Text:
    return literal(n.attr), ATOM if isinstance(n.attr, bool) or n.attr >= 0 else 30


def _choice(p: Printer, n: Node) -> Text:
    """Spell a choice; a constant branch says its type: a bare number would fit two."""
    c, x, y = n.args

    def branch(a: Node) -> str:
        return f"{type_of(a.dtype)}({p.text(a)})" if a.op == "const" else p.text(a)

    return f"where({p.text(c)}, {branch(x)}, {branch(y)})", ATOM


def _limit(name: str) -> Spelling:
    def spell(p: Printer, n: Node) -> Text:
        # A constant stands first: where the two are equal, zeros of either sign or a NaN, the second one is kept.
        args = sorted(n.args, key=lambda a: a.op != "const")
        texts = [f"{type_of(a.dtype)}({p.text(a)})" if a.op == "const" else p.text(a) for a in args]
        assert isinstance(p, CppPrinter)
        exact = n.dtype.is_float and p.phases.program.maths == "strict"
        return f"{f'{name}imum' if exact else name}({', '.join(texts)})", ATOM

    return spell


def _min(p: Printer, n: Node) -> Text:
    """Spell a minimum; of a pattern and NaN's, in fast maths, the pattern without a NaN's payload.

    The least of two integers would pass negative NaNs on as they are: a GPU never makes one, a CPU keeps what it read.
    """
    x, y = sorted(n.args, key=lambda a: a.op != "bitcast")
    assert isinstance(p, CppPrinter)
    if p.phases.program.maths == "strict":
        return _limit("min")(p, n)
    if x.op == "bitcast" and x.args[0].dtype.name == "f32" and is_const(y, NAN):
        return (f"bits_or_nan(as_float({p.text(x)}))", ATOM) if x.uid in p.names else p.call("bits_or_nan", x.args[0])
    return _limit("min")(p, n)


def _cast(p: Printer, n: Node) -> Text:
    (x,) = n.args
    to, of = n.dtype.name, x.dtype.name
    if x.op == "load" and x.attr == "g":
        return p.express(x)  # read as F, whatever dtype the gradient has
    assert isinstance(p, CppPrinter)
    if to == "f32":
        return p.call({"i32": "to_float", "bf16": "widened", "f16": "widen_half"}[of], x)
    if of == "f32":
        return p.call("narrow_half" if to == "f16" else "to_int", x)
    if of == "bool" or x.uid in p.raw:
        return p.call("to_int", x)
    if to == "i32":  # the narrow value was not in memory: its upper bits still stand
        byte = x.dtype.kind == "uint"
        return (f"{p.text(x, 5)} & {(1 << x.dtype.bits) - 1}", 5) if byte else p.call("extend16", x)
    return p.express(x)  # stores truncate


def _bitcast(p: Printer, n: Node) -> Text:
    (x,) = n.args
    to, of = n.dtype.name, x.dtype.name
    if to == "f32":
        return p.call("as_float", x)
    if of == "f32":
        return p.call("bits", x)
    if to == "i16":
        assert isinstance(p, CppPrinter)
        return p.call("extend16", x) if x.uid not in p.raw else (f"extend16(to_int({p.text(x)}))", ATOM)
    return p.express(x)


def _table(p: Printer, n: Node) -> Text:
    return f"{n.op}({n.attr}, {p.text(n.args[0])})", ATOM


def tables(roots: Iterable[Node]) -> list[str]:
    """Return the definitions of the tables that programs of these roots look things up in."""
    found = {str(n.attr): n.attr for n in postorder(roots) if n.op in ("lookup", "search")}
    lines = []
    for name, table in sorted(found.items()):
        numbers = [literal(x) for x in table.values]
        lines += wrapped(f"static constexpr float {name}[] = {{", numbers, "};")
    return lines


def _sym(p: Printer, n: Node) -> Text:
    assert isinstance(p, CppPrinter)
    return p.phases.scalar[str(n.attr)], ATOM


def _load(p: Printer, n: Node) -> Text:
    assert isinstance(p, CppPrinter)
    if n.attr == "g":
        return "Grad::load(g_at + i)", ATOM
    if n.attr == "p" and p.phases.weight:
        return "weight.decode(i)", ATOM
    if n.space.name in spaces.SMALL:
        return _load_few(p.phases.program.space, n), ATOM
    return f"{'raw' if n.uid in p.raw else 'load'}({n.attr}_at + {'b' if n.space.name == 'block' else 'i'})", ATOM


def _load_few(runs_over: Space, n: Node) -> str:
    """Load values of rows, columns, matrices or tensors: from memory, or from an array of the tile (see stages.h)."""
    if n.space.name in ("row", "mat") and n.space != runs_over:
        return f"load({n.attr}_at + (i & row_mask))"
    if n.space.name in ("tensor", "model") and n.space != runs_over:
        return f"F(*{n.attr}_at)"
    return f"load({n.attr}_at + i)"


def _draw(p: Printer, n: Node) -> Text:
    assert isinstance(p, CppPrinter)
    kind, _, width, of = n.attr
    more = f", {width}" if kind != "integer" else ""
    return f"{kind}<{p.phases.number(of)}{more}>(noise)", ATOM


_EXTENTS = ("rows", "columns", "elements")

SPELL: dict[str, Spelling] = {
    **dict.fromkeys(_INFIX, _infix),
    "mul": _mul,
    "const": _const,
    "sym": _sym,
    "key": lambda p, n: (str(n.attr), ATOM),
    "index": lambda p, n: ("(I(first) + iota(i))", ATOM),
    "load": _load,
    "draw": _draw,
    "extent": lambda p, n: (f"F(extent[{_EXTENTS.index(n.attr)}])", ATOM),
    "neg": lambda p, n: (f"-{p.text(n.args[0], 31)}", 30),
    "not": lambda p, n: (f"~{p.text(n.args[0], 30)}", 30),
    "abs": _call("abs"),
    "min": _min,
    "max": _limit("max"),
    "fma": _call("fma"),
    "where": _choice,
    "sign": _call("sign"),
    "lshr": _call("lshr"),
    "rotl": _call("rotl"),
    "cast": _cast,
    "bitcast": _bitcast,
    "rint": _call("rint"),
    "floor": _call("floor"),
    "lookup": _table,
    "search": _table,
    **dict.fromkeys(GATHERS, lambda p, n: p.express(n.args[0])),  # gathered where the tile's array was filled
    "sqrt": _call("sqrt"),
    "rcp": _rcp,
}


def cost(nodes: Iterable[Node]) -> int:
    """Operations; loads and other looks at the same bits are none."""
    return sum(n.op not in ("load", "cast", "bitcast") for n in nodes)


@dataclass
class Phase:
    """The work between two rounds of reductions: first for the blocks, then for the elements.

    found   the reductions of the phase before, which the blocks' stage finishes
    apart   a loop that left the phase before it: it has no stage, and the next phase does not wait for it
    low     that is so for weights of 16 bits only: to read and write others is too little work
    """

    found: list[Node] = field(default_factory=list)
    blocks: list[Let] = field(default_factory=list)
    elements: list[Let] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    block_stores: list[Store] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    apart: bool = False
    low: bool = False


def _union(lists: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


class Phases:
    """The phases of a sweep: the one that computes each value, and the values that outlive theirs.

    weight   True if the weight is f32, in whose place the kernel has any (`weight`)
    wants    value -> random bits
    """

    def __init__(
        self,
        schedule: Schedule,
        function: str,
        reserved: frozenset[str] = RESERVED,
        head: Mapping[int, str] | None = None,
    ) -> None:
        sweep = schedule.sweep
        self.program, self.function = schedule.program, function
        self.weight = any(b.role == "param" and b.dtype is dtypes.f32 for b in self.program.buffers)
        self.wants = {name: bits for name, bits in self.program.draws.wants if bits or name == "p"}
        self.values = [name for name in self.wants if name != "p"]
        self.reserved = reserved
        self.head = dict(head or {})  # names that stand before all loops
        roots = [let.node for let in sweep.lets] + [s.node for s in sweep.stores]
        self.nodes = list(postorder(roots))
        self._level: dict[int, int] = {}
        for n in self.nodes:
            below = max((self._level[a.uid] for a in n.args), default=0)
            self._level[n.uid] = below + (n.op in ("block_max", "block_min"))
        self.phases = [Phase() for _ in range(1 + max(self._level.values(), default=0))]
        self.name: dict[int, str] = {}
        self._taken = set(reserved) | {f"{b.name}_{x}" for b in self.program.buffers for x in ("at", "packed")}
        # Scalars keep their position; a name that means something here gets another.
        self.scalar = {let.name: self.fresh(let.name) for let in self.program.host}
        for let in sweep.lets:
            self._name(let.node, let.name)
            if let.node.op not in ("block_max", "block_min", "draw"):
                phase = self.phases[self._level[let.node.uid]]
                (phase.blocks if let.node.space.name == "block" else phase.elements).append(let)
        for n in self.nodes:
            if n.op in ("block_max", "block_min"):
                self.phases[self._level[n.args[0].uid]].reductions.append(n)
                self.phases[self._level[n.uid]].found.append(n)
                self._name(n, "largest_of_block" if n.op == "block_max" else "smallest_of_block")
        for s in sweep.stores:  # every buffer is read in phase 0, before any is written
            phase = self.phases[self._level[s.node.uid]]
            block = self.program.buffer(s.buffer).space.name == "block"
            (phase.block_stores if block else phase.stores).append(s)
        # Loads that a later phase reads again are kept as whole numbers, all others stay as they were loaded.
        loads = {n.uid for n in self.nodes if n.op == "load" and n.attr != "g" and n.dtype.name in _RAW}
        self.raw = frozenset(loads)
        self._find_kept()
        kept = loads & {n.uid for n in (*self.kept, *self.across)}
        self.raw = frozenset(loads - kept)
        self._drop_unread()
        self._find_kept()
        self._split()
        self._find_kept()
        drawn = [self.draws(k) for k in range(len(self.phases))]
        self.drawn, self.kept_draws = _union(drawn), _union(drawn[self.first + 1 :])

    def fresh(self, wanted: str) -> str:
        """Return a name that nothing else has; arrays are called `<name>_kept`, so no name ends like that."""
        base = f"{wanted}_" if wanted in self.reserved or wanted.endswith("_kept") else wanted
        name, k = base, 1
        while name in self._taken:
            k += 1
            name = f"{base.rstrip('_')}_{k}"
        self._taken.add(name)
        return name

    def _name(self, n: Node, wanted: str) -> None:
        if n.uid not in self.name:
            self.name[n.uid] = self.fresh(wanted)

    def _trivial(self, n: Node) -> bool:
        """Return True if n costs less to compute again than to keep: another look at a named value, or noise."""
        looks = n.op in ("abs", "neg", "bitcast") and n.space.name == "elem"
        return n.op == "draw" or (looks and n.args[0].uid in self.name)

    def operands(self, n: Node) -> tuple[Node, ...]:
        """Return the nodes that the text of a node reads."""
        found = idiom(n)
        if found is None or found.helper not in _SAID or any(a.uid not in self.raw for a in found.args):
            return n.args
        return found.args

    @property
    def first(self) -> int:
        """The first phase with a loop over elements, 0 where there is none."""
        return next((k for k in range(len(self.phases)) if self.phase_roots(k)), 0)

    def draws(self, k: int) -> list[str]:
        """Return the values that the elements' loop of phase k draws random bits for."""
        own = {let.node.uid for let in self.phases[k].elements}
        nodes = self.computed(self.phase_roots(k), own, set()).values()
        stored = ["p"] if self.weight and any(s.buffer == "p" for s in self.phases[k].stores) else []
        return [*(n.attr[3] for n in nodes if n.op == "draw"), *stored]

    def number(self, of: str) -> str:
        """Return the place of a value among those that random bits are dealt to."""
        return str(self.values.index(of)) if of in self.values else "P"

    def mask(self, values: list[str]) -> str:
        """Return the text of the words of these values' bits."""
        return f"NOISE.mask({{{', '.join(map(self.number, values))}}})" if values else "0"

    def noise_lines(self) -> list[str]:
        """Return the members of a kernel's struct that say which random bits it draws, and which it keeps."""
        if not self.drawn:
            return []
        names, rare = [*self.values, "p"], self.program.draws.rare
        wants = [str(self.wants.get(name) or "Weight::NOISE") for name in names]
        shown = ", ".join(f"{{{n}, {str(name in rare).lower()}}}" for n, name in zip(wants, names, strict=True))
        return [
            f"    // random bits of {', '.join(names)}; which of their words are drawn, and kept",
            f"    static constexpr auto NOISE = dealt({{{shown}}});",
            f"    static constexpr int DRAWN = {self.mask(self.drawn)}, KEPT = {self.mask(self.kept_draws)};",
        ]

    def apart(self, k: int) -> list[int]:
        """The loops that left phase k."""
        return list(itertools.takewhile(lambda j: self.phases[j].apart, range(k + 1, len(self.phases))))

    def phase_roots(self, k: int) -> list[Node]:
        """Return the nodes that the elements' loop of phase k computes."""
        phase = self.phases[k]
        own = [r.args[0] for r in phase.reductions] + [wanted(s.node) for s in phase.stores]
        return [let.node for let in phase.elements] + own

    def tile_size(self) -> str:
        """Return the text of how many elements a tile has."""
        if self.program.block == 1:
            return str(FLAT)
        noise = " + count(KEPT)" if self.kept_draws else ""
        return f"elements_of_tile({self.program.block}, {len(self.kept)}{noise})"

    def _drop_unread(self) -> None:
        """Lets that nothing reads as it is printed go: a store takes a byte of a word, an idiom what was loaded."""
        roots = [wanted(s.node) for phase in self.phases for s in (*phase.stores, *phase.block_stores)]
        seen: set[int] = set()
        stack = list(roots)
        while stack:
            n = stack.pop()
            if n.uid not in seen:
                seen.add(n.uid)
                stack.extend(self.operands(n))
        for phase in self.phases:
            phase.elements = [let for let in phase.elements if let.node.uid in seen]

    def uses(self, roots: list[Node], own: set[int]) -> list[Node]:
        """Named values that code for `roots` reads and that are not its `own`, the lets among the roots."""
        out: dict[int, Node] = {}
        seen: set[int] = set()
        stack = list(reversed(roots))
        while stack:
            n = stack.pop()
            if n.uid in seen:
                continue
            seen.add(n.uid)
            if n.uid in self.name and n.uid not in own and not self._trivial(n):
                out[n.uid] = n
            else:
                stack.extend(reversed(self.operands(n)))
        return list(out.values())

    def _find_kept(self) -> None:
        """kept: elements' values that a later phase reads; across: blocks' values that other loops read."""
        self.kept: list[Node] = []
        self.across: list[Node] = []
        for k, phase in enumerate(self.phases):
            own = {let.node.uid for let in phase.elements}
            for n in self.uses(self.phase_roots(k), own):
                if n.space.name == "block":
                    self._add(self.across, n)
                else:
                    self._add(self.kept, n)
            own = {let.node.uid for let in phase.blocks}
            roots = [let.node for let in phase.blocks] + [s.node for s in phase.block_stores]
            for n in self.uses(roots, own):
                if all(n is not m for m in phase.found):
                    self._add(self.across, n)

    def _split(self) -> None:
        """Stores that read what is kept anyway leave their phase for a loop of their own.

        A processor looks some 300 instructions ahead: the shorter the chain from load to store, the more of them it
        works on at a time.  AdamW's weight, done apart from its moments, saves a tenth of the step.
        """
        for k in range(len(self.phases) - 1, -1, -1):
            phase = self.phases[k]
            own = {let.node.uid for let in phase.elements}
            kept = [n for n in self.kept if n.uid in own]
            stay = self.computed([*kept, *(r.args[0] for r in phase.reductions)], own, set())
            stop = {n.uid for n in kept}
            leaving: list[Store] = []
            for s in phase.stores:
                need = self.computed([wanted(s.node)], own, stop)
                worth = cost(need.values()) >= WORTH or (s.buffer == "p" and self.weight)
                if kept and worth and cost(n for uid, n in need.items() if uid in stay) <= 1:
                    leaving.append(s)
                else:
                    stay |= self.computed([wanted(s.node)], own, set())
            gone = self.computed([wanted(s.node) for s in leaving], own, stop)
            written = {s.buffer for s in phase.stores if all(s is not x for x in leaving)}
            if written & {n.attr for n in gone.values() if n.op == "load"}:
                continue  # the first loop would overwrite what the second one reads
            if not leaving or cost(n for uid, n in gone.items() if uid in stay) > 1:
                continue
            own_loop = [let for let in phase.elements if let.node.uid in gone]
            low = cost(gone.values()) < WORTH and all(n.space.name == "elem" for n in self._read_by(leaving, own_loop))
            apart = Phase(elements=own_loop, stores=leaving, apart=True, low=low)
            phase.elements = [let for let in phase.elements if let.node.uid in stay]
            phase.stores = [s for s in phase.stores if all(s is not x for x in leaving)]
            self.phases.insert(k + 1, apart)

    def _read_by(self, stores: list[Store], lets: list[Let]) -> list[Node]:
        """Return the values that a loop of its own for these stores finds made."""
        roots = [let.node for let in lets] + [wanted(s.node) for s in stores]
        return self.uses(roots, {let.node.uid for let in lets})

    def computed(self, roots: list[Node], own: set[int], stop: set[int]) -> dict[int, Node]:
        """Elements' nodes that a loop for the roots computes: not those of other phases, nor what is in `stop`."""
        out: dict[int, Node] = {}
        stack = list(roots)
        while stack:
            n = stack.pop()
            foreign = n.uid in self.name and n.uid not in own and not self._trivial(n)
            if n.uid in out or n.uid in stop or foreign or n.space.name != "elem":
                continue
            out[n.uid] = n
            stack.extend(self.operands(n))
        return out

    @staticmethod
    def _add(to: list[Node], n: Node) -> None:
        if all(m is not n for m in to):
            to.append(n)


def assigned(plan: Phases, let: Let, printer: CppPrinter) -> tuple[str, str]:
    """(code, comment) of a let; from here on its node prints as its name."""
    text, _ = printer.express(let.node)
    name = plan.name[let.node.uid]
    printer.names[let.node.uid] = name
    # A type of its own: `auto` would keep a constant a plain number.
    kind = _RAW[let.node.dtype.name] if let.node.uid in plan.raw else _value_type(let.node)
    return f"const {kind} {name} = {text};", comment_of(let)


def _value_type(n: Node) -> str:
    """The gradient is read as F, whatever dtype the program gives it."""
    return "F" if n.op == "load" and n.attr == "g" else type_of(n.dtype)


def stored(plan: Phases, s: Store, printer: CppPrinter, at: str) -> str:
    to, node = f"{s.buffer}_at + {at}", s.node
    if s.buffer == "p" and plan.weight:
        value = f"F({printer.text(node)})" if node.space.name == "host" else printer.text(node)
        return f"weight.encode(i, {value}, {'noise' if plan.drawn else 'NONE'});"
    if node.op in ("const", "sym") or node.space.name == "host":
        return f"store({to}, {type_of(node.dtype)}({printer.text(node)}));"
    if node.uid in plan.raw:
        return f"store({to}, to_int({printer.text(node)}));"
    shifted = _shifted(node)
    if shifted is not None:  # the part that is wanted moves down and out in one permutation
        word, bits, size = shifted
        return f"store_{'byte' if size == 8 else 'half'}<{bits // 8}>({to}, {printer.text(word)});"
    return f"store({to}, {printer.text(node)});"


def wanted(node: Node) -> Node:
    """Return the node that a store of this one reads."""
    shifted = _shifted(node)
    return node if shifted is None else shifted[0]


def _shifted(node: Node) -> tuple[Node, int, int] | None:
    """(word, bits, size) of what is the `size` bits of a word above its lowest `bits`, whole bytes."""
    size = int(node.dtype.bits)
    while node.op in ("cast", "bitcast") and node.dtype.name in ("u8", "i16", "bf16", "f16"):
        (node,) = node.args
    if size < 32 and node.op in ("shr", "lshr") and node.args[1].attr in (8, 16, 24):
        bits = int(node.args[1].attr)
        return (node.args[0], bits, size) if bits + size <= 32 and node.space.name == "elem" else None
    return None


def _pointer(b: Buffer, position: int | str) -> str:
    if b.dtype.packed:
        const = "" if b.writes else "const "
        return f"{const}uint8_t *__restrict {b.name}_packed = ({const}uint8_t *)at[{position}];"
    kind = "typename Grad::stored" if b.role == "grad" else STORED[b.dtype.name]
    const = "" if b.writes else "const "
    return f"{const}{kind} *__restrict {b.name}_at = ({const}{kind} *)at[{position}];"


def _buffer_comment(b: Buffer) -> str:
    access = " and ".join(w for w, yes in (("read", b.reads), ("written", b.writes)) if yes)
    kind = "float" if b.role == "grad" else b.dtype.torch
    if b.dtype.packed:
        return f"{b.dtype.bits}-bit codes [n]  {access}"
    return f"{kind} [{f'blocks of {b.space.size}' if b.space.size else 'n'}]  {access}"


def _column(b: Buffer) -> str:
    if b.dtype.packed:
        return f"{{{b.dtype.bits}, EIGHTH, {str(b.writes).lower()}}}"
    size = "sizeof(typename Grad::stored)" if b.role == "grad" else str(int(b.dtype.bytes))
    return f"{{{size}, {'BLOCK_OF' if b.space.name == 'block' else 'ELEMENT'}, {str(b.writes).lower()}}}"


def kernel(schedule: Schedule, function: str, source: str = "", host: Sequence[Let] | None = None) -> list[str]:
    """Return the tile function of one (rule, plan, flags), in a struct that says what its buffers are.

    It is a template over how the weight is kept and the dtype of the gradient.  A weight in another dtype than f32 is
    a buffer as any other, and read and written as the program says.

    host   the scalars that are passed, by default the program's
    """
    program, plan = schedule.program, Phases(schedule, function)
    host = program.host if host is None else host
    out = ["template <class Weight, class Grad>", f"struct {function} {{", *plan.noise_lines()]
    size = f"BLOCK = {program.block}, TILE = {plan.tile_size()}, SCALARS = {len(host)};"
    out += [f"    static constexpr int {size}", "    // bytes per entry, of what, written"]
    columns = [_column(b) for b in program.buffers]
    if not plan.weight:
        out.append(f"    static constexpr Column COLUMNS[] = {{{', '.join(columns)}}};")
    elif columns[2:]:
        more = f"columns<Weight, Grad, Column>({{{', '.join(columns[2:])}}});"
        out.append(f"    static constexpr auto COLUMNS = {more}")
    else:
        out.append("    static constexpr auto COLUMNS = columns<Weight, Grad, Column>();")
    out.append("")
    extent = "blocks" if program.block > 1 else "count"
    out += head_of_tile(extent, "const float *scalars, int32_t step_key, int32_t stream_key")
    body = ["Weight weight(at[0], at + 2);"] if plan.weight else []
    rows = [(b, _position(plan, k)) for k, b in enumerate(program.buffers) if b in program.touched]
    pointers = [(_pointer(b, k), _buffer_comment(b)) for b, k in rows if k != "0" or not plan.weight]
    body += with_comments(pointers, comment_mark="//")
    read = {n.attr for n in plan.nodes if n.op == "sym"}
    body += [f"const F {plan.scalar[x.name]}(scalars[{at}]);" for x, at in scalars(program, host) if x.name in read]
    body += loops(plan, extent, source)
    out += [f"        {line}" if line else "" for line in body]
    return [*out, "    }", "};"]


def _position(plan: Phases, k: int) -> str:
    """Return the place of the k-th buffer's address: behind as many as the weight has parts."""
    return f"parts<Weight>() + {k - 1}" if plan.weight and k > 1 else str(k)


def scalars(program: Program, host: Sequence[Let]) -> list[tuple[Let, int]]:
    """Return the program's scalars and their places among those that are passed."""
    places = {let.node.uid: k for k, let in enumerate(host)}
    return [(let, places[let.node.uid]) for let in program.host]


def weight(name: str, decode: Schedule, encode: Schedule, value: Node, bits: int, doc: str) -> list[str]:
    """Return the struct of how a plan keeps a weight that is not f32: its parts, and how it is read and written.

    decode, encode  the schedules of its codec (lower_weight)
    value           the node of the weight in the program of `encode`
    bits            random bits that it is rounded by
    """
    parts = [b for b in encode.program.buffers if any(s.buffer == b.name for s in encode.sweep.stores)]
    read = {n.attr for n in postorder(s.node for s in decode.sweep.stores) if n.op == "load"}
    rows = ", ".join(f"{{{int(b.dtype.bytes)}, {str(b.name in read).lower()}}}" for b in parts)
    types = [f"{STORED[b.dtype.name]} *" for b in parts]
    given = [f"({kind})" + (f"more[{k - 1}]" if k else "p") for k, kind in enumerate(types)]
    made = ", ".join(f"{b.name}_at({address})" for b, address in zip(parts, given, strict=True))
    out = [f"// {doc}", f"struct {name} {{", f"    static constexpr int NOISE = {bits};"]
    out.append(f"    static constexpr Part PARTS[] = {{{rows}}};  // {', '.join(b.name for b in parts)}")
    out += [f"    {kind}__restrict {b.name}_at;" for b, kind in zip(parts, types, strict=True)]
    out += ["", f"    {name}(char *p, char *const *more) : {made} {{}}", "    F decode(int i) const {"]
    plan = Phases(decode, name)
    printer = CppPrinter(plan)
    out += [f"        {line}" for line in _codec_lines(plan, printer)]
    (only,) = decode.sweep.stores
    out += [f"        return {printer.text(only.node)};", "    }"]
    out.append("    template <class Noise> void encode(int i, F x, const Noise &noise) const {")
    plan = Phases(encode, name, RESERVED | {"x"}, {value.uid: "x"})
    printer = CppPrinter(plan)
    out += [f"        {line}" for line in _codec_lines(plan, printer)]
    out += [f"        {stored(plan, s, printer, 'i')}" for s in encode.sweep.stores]
    ahead = " ".join(f"fetch<N>({b.name}_at, b);" for b in parts if b.name in read)
    return [*out, "    }", f"    template <int N> void ahead(int b) const {{ {ahead} }}", "};"]


def _codec_lines(plan: Phases, printer: CppPrinter) -> list[str]:
    """Return the lines of a codec's lets."""
    lines = []
    for let in plan.program.host:
        lines.append(f"const F {plan.scalar[let.name]}({literal(_number(let.node))});")
    roots = [wanted(s.node) for s in plan.program.stores]
    read = plan.computed(roots, {let.node.uid for let in plan.phases[0].elements}, set(printer.names))
    for let in plan.phases[0].elements:
        if let.node.uid in read:
            lines.append(assigned(plan, let, printer)[0])
    return lines


def _number(node: Node) -> float:
    """Return the value of a host expression without names, fp64."""
    if node.op == "const":
        return float(node.attr)
    return float({"add": add, "sub": sub, "mul": mul, "div": truediv}[node.op](*map(_number, node.args)))


def head_of_tile(extent: str, known: str) -> list[str]:
    """Return the first lines of a tile's function; `known`: its last parameters."""
    start = "    OPTGEN_ONCE static void tile("
    first = f"{start}char *const *at, int {extent}, const int *live, int32_t first,"
    return ["    template <bool RAGGED>", first, " " * len(start) + known + ") {"]


def loops(plan: Phases, extent: str, source: str) -> list[str]:
    """Return the arrays on the stack and the loops; `extent`: "blocks" or "count", what the tile is counted in."""
    body = [*tables(plan.program.roots()), *unpacked(plan.program)]
    for n in plan.kept:
        body.append(f"alignas(64) {KEPT[_value_type(n)]} {plan.name[n.uid]}_kept[TILE];")
    for n in plan.across:
        if n.op in ("block_max", "block_min"):
            continue
        body.append(f"alignas(64) {KEPT[type_of(n.dtype)]} {plan.name[n.uid]}_kept[TILE / BLOCK];")
    for phase in plan.phases:
        body += [f"I {plan.name[n.uid]}_kept[TILE / BLOCK];" for n in phase.reductions]
    if plan.drawn:
        size = "BLOCK * blocks" if extent == "blocks" else "count"
        body.append(f"Words<{plan.function}> words({size}, first, stream_key, step_key);")
    body += _block_stage(plan, 0)
    for k in (k for k, phase in enumerate(plan.phases) if not phase.apart):
        body += _element_phase(plan, k, extent == "blocks", source)
        rest = plan.apart(k)
        following = k + len(rest) + 1
        if following < len(plan.phases):
            body += _block_stage(plan, following)
        for j in rest:  # they hide how long the stage takes: 4 % of AdamW int8_split24
            body += _element_phase(plan, j, extent == "blocks", source)
    return body + packed(plan.program)


def unpacked(program: Program) -> list[str]:
    """Codes that share bytes are worked on as bytes of their own."""
    found = [b for b in program.touched if b.dtype.packed]
    out = [f"alignas(64) uint8_t {b.name}_at[TILE];" for b in found]
    return out + [f"unpack<{b.dtype.bits}>({b.name}_at, {b.name}_packed, BLOCK * blocks);" for b in found if b.reads]


def packed(program: Program) -> list[str]:
    """Return the lines that pack the codes again."""
    found = [b for b in program.buffers if b.dtype.packed and b.writes]
    lines = [f"pack<{b.dtype.bits}>({b.name}_packed, {b.name}_at, BLOCK * blocks);" for b in found]
    dead = [f"no_codes<BLOCK>({b.name}_at, blocks, live);" for b in found]
    return ["", *dead, *lines] if lines else []


def _fetched(plan: Phases, k: int) -> list[str]:
    """Return what the elements' loop of phase k asks for: what the next loop reads first, or a part of the next tile.

    A processor's own prefetchers stop at the end of a page, and a loop takes long enough that nothing else hides what
    they miss: beyond the caches AdamW int8_split24 took 68 cycles for 16 parameters without, 51 of them arithmetic, and
    takes 53.5 (Zen 4).  All of a tile asked for at its start, or two tiles ahead in one loop: 55 to 64.  What the next
    tile begins with is dealt out to all loops that ask for nothing else: 4 % faster than where the last one asks for
    all of it (Zen 5: 27 cycles, 57 without).
    """
    order = [n for n in range(len(plan.phases)) if plan.phase_roots(n)]
    asked = {at: _loaded(plan, after) for at, after in itertools.pairwise(order)}
    if asked.get(k):
        return [_fetch(plan, b, "") for b in asked[k]]
    idle = [n for n in order if not asked.get(n)]
    first, at, parts = _loaded(plan, order[0]), idle.index(k), len(idle)
    dealt = first[at * len(first) // parts : (at + 1) * len(first) // parts]
    return [_fetch(plan, b, " + TILE / BLOCK") for b in dealt]


def _loaded(plan: Phases, k: int) -> list[Buffer]:
    """The elements' buffers that phase k reads."""
    own = {let.node.uid for let in plan.phases[k].elements}
    loaded = {n.attr for n in plan.computed(plan.phase_roots(k), own, set()).values() if n.op == "load"}
    return [b for b in plan.program.buffers if b.name in loaded and b.space == spaces.elem]


def _fetch(plan: Phases, b: Buffer, shift: str) -> str:
    if b.role == "param" and plan.weight:
        return f"fetch_weight<BLOCK>(weight, b{shift});"
    name, bits = (f"{b.name}_packed", int(b.dtype.bits)) if b.dtype.packed else (f"{b.name}_at", 8)
    return f"fetch<{f'BLOCK * {bits} / 8' if bits < 8 else 'BLOCK'}>({name}, b{shift});"


def keep(n: Node, name: str, at: str) -> str:
    return f"store({name}_kept + {at}, {f'to_int({name})' if type_of(n.dtype) == 'M' else name});"


def read_kept(n: Node, name: str, at: str) -> str:
    return f"load({name}_kept + {at})" + (" != I(0)" if type_of(n.dtype) == "M" else "")


def _block_stage(plan: Phases, k: int) -> list[str]:
    phase = plan.phases[k]
    found = phase.found
    if not phase.blocks and not phase.block_stores and not found:
        return []
    printer = CppPrinter(plan)
    lines: list[tuple[str, str]] = []
    for n in found:
        name = plan.name[n.uid]
        lines.append((f"const I {name} = {'largest' if n.op == 'block_max' else 'smallest'}({name}_kept + b);", ""))
        printer.names[n.uid] = name
    own = {let.node.uid for let in phase.blocks}
    roots = [let.node for let in phase.blocks] + [s.node for s in phase.block_stores]
    for n in plan.uses(roots, own):
        if all(n is not m for m in found):  # those end here: what they are the maxima of, elements have
            name = plan.name[n.uid]
            lines.append((f"const {type_of(n.dtype)} {name} = {read_kept(n, name, 'b')};", ""))
            printer.names[n.uid] = name
    lines += [assigned(plan, let, printer) for let in phase.blocks]
    made = own | {n.uid for n in found}
    for n in plan.across:
        if n.uid in made:
            lines.append((keep(n, plan.name[n.uid], "b"), ""))
    lines += [(stored(plan, s, printer, "b"), "") for s in phase.block_stores]
    out = ["", "// -- blocks", "for (int b = 0; b < blocks; b += W) {"]
    return [*out, *(f"    {x}" for x in with_comments(lines, comment_mark="//")), "}"]


def _element_phase(plan: Phases, k: int, blocked: bool, source: str) -> list[str]:
    """The loop of a phase.  Where only some weights have one of their own, what it does stands before it as a function
    of an element's number and of what is kept, which either loop calls."""
    phase, roots = plan.phases[k], plan.phase_roots(k)
    if not roots:
        return []
    printer = CppPrinter(plan)
    own = {let.node.uid for let in phase.elements}
    head: list[str] = []
    read: list[tuple[str, str]] = []
    lines: list[tuple[str, str]] = []
    low = next((j for j in plan.apart(k) if plan.phases[j].low), None)
    if plan.drawn and k == plan.first:
        read.append(("const auto noise = words.at(i);", ""))
    elif plan.draws(k):
        read.append(("const auto noise = words.kept(i);", ""))
    for n in plan.uses(roots, own):
        name = plan.name[n.uid]
        printer.names[n.uid] = name
        if n.space.name == "block":
            value = f"({name}_kept[b])" if type_of(n.dtype) != "M" else f" = I({name}_kept[b]) != I(0)"
            head.append(f"const {type_of(n.dtype)} {name}{value};")
        else:
            read.append((f"const {_value_type(n)} {name} = {read_kept(n, name, 'i')};", ""))
    for n in phase.reductions:
        head.append(f"I {plan.name[n.uid]}({'INT32_MIN' if n.op == 'block_max' else 'INT32_MAX'});")
    for let in phase.elements:
        lines.append(assigned(plan, let, printer))
    for n in phase.reductions:
        name = plan.name[n.uid]
        better = "larger" if n.op == "block_max" else "smaller"
        lines.append((f"{name} = {better}<RAGGED>({name}, {printer.text(n.args[0])}, i, end);", ""))
    if plan.kept_draws and k == plan.first:
        lines.append(("words.keep(noise, i);", ""))
    for n in plan.kept:
        if n.uid in own:
            lines.append((keep(n, plan.name[n.uid], "i"), ""))
    lines += [(stored(plan, s, printer, "i"), "") for s in phase.stores]
    before: list[str] = []
    if phase.low:
        lines = [(_call_weight(plan, k), "")]
    if low is not None:
        before = _weight_function(plan, low)
        lines += [("if constexpr (!apart<Weight>())", ""), (f"    {_call_weight(plan, low)}", "")]
    inner = [f"    {x}" for x in with_comments(read + lines, comment_mark="//")]
    stages = list(dict.fromkeys(let.stage for let in phase.elements)) or ["encode"]
    title = f"// -- elements: {', '.join(stages)}" + (f"  ({source})" if "update" in stages and source else "")
    if not blocked:
        return ["", title, "for (int i = 0; i < count; i += W) {", *inner, "}"]
    loop = "for (int b = 0; b < blocks; b++) {"
    out = ["", *before, title, f"if constexpr (apart<Weight>()) {loop}" if phase.low else loop]
    if phase.reductions:
        out.append("    const int end = b * BLOCK + (RAGGED ? live[b] : BLOCK);")
    out += [f"    {x}" for x in _fetched(plan, k)]
    if low is not None:
        fetched = " ".join(_fetched(plan, low))
        out += [f"    if constexpr (!apart<Weight>()) {{ {fetched} }}"] if fetched else []
    out += [f"    {x}" for x in head]
    # Counted from 0 so that compilers see how often, and write short loops out: 2 to 5 % faster.
    out += ["    for (int k = 0; k < BLOCK; k += W) {", "        const int i = b * BLOCK + k;"]
    out += [f"    {x}" for x in inner]
    out.append("    }")
    out += [f"    {plan.name[n.uid]}_kept[b] = {plan.name[n.uid]};" for n in phase.reductions]
    return [*out, "}"]


def _weight_function(plan: Phases, k: int) -> list[str]:
    """Return the function of what phase k does to an element's weight."""
    phase, printer = plan.phases[k], CppPrinter(plan)
    used = plan.uses(plan.phase_roots(k), {let.node.uid for let in phase.elements})
    printer.names |= {n.uid: plan.name[n.uid] for n in used}
    lines = [assigned(plan, let, printer) for let in phase.elements]
    lines += [(stored(plan, s, printer, "i"), "") for s in phase.stores]
    given = "".join(f", {_value_type(n)} {plan.name[n.uid]}" for n in used)
    body = [f"    {x}" for x in with_comments(lines, comment_mark="//")]
    return [f"const auto update_weight = [&](int i{given}, const auto &noise) {{", *body, "};"]


def _call_weight(plan: Phases, k: int) -> str:
    used = plan.uses(plan.phase_roots(k), {let.node.uid for let in plan.phases[k].elements})
    return f"update_weight({', '.join(['i', *(plan.name[n.uid] for n in used), 'noise'])});"


__all__ = ["kernel", "literal", "loops"]
