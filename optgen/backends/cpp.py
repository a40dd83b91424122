"""C++ expressions, and the loops that a sweep over the elements of a tile takes.

A reduction over storage blocks cuts the work on a tile in two: *phase* k reads what the reductions of the phases before
it found.  Between two phases stands a stage for the blocks' own values, a vector of blocks at a time; a value that a
later phase reads again is kept in an array on the stack, which the first-level cache holds.

The text is written over the vector types of `optgen.h`: F, I and M, whose width is the machine's.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from optgen.backends.idioms import idiom
from optgen.backends.printer import (
    ATOM,
    Printer,
    Spelling,
    Text,
    comment_of,
    shortest,
    taken_away,
    whole,
    wrapped,
)
from optgen.ir.node import Node, is_const, postorder
from optgen.ir.program import Let, Schedule, Store, Sweep
from optgen.ops import dtypes
from optgen.ops.dtypes import DType

NAN = 0x7FC00000  # f32, without a payload
WORTH = 6  # operations from which on a loop of their own pays

_TYPE: Mapping[str, str] = {"f32": "F", "bool": "M"}  # all else is whole numbers, or bits, in an I
STORED: Mapping[str, str] = {
    "f32": "float", "bf16": "uint16_t", "f16": "uint16_t", "i32": "int32_t", "i16": "int16_t", "i8": "int8_t",
    "u8": "uint8_t", "u4": "uint8_t", "u2": "uint8_t", "u1": "uint8_t",
}  # fmt: skip
BLOCK_LIMITS: Mapping[str, str] = {"block_max": "largest", "block_min": "smallest"}
# What the printed functions name themselves, call or receive, and C++'s own words.
RESERVED = frozenset(
    "abs across ahead alignas alignof and and_eq apart as_float asm at at_least at_most auto b bfloat16 bitand bitor "
    "bits bits_or_nan BLOCK BLOCKS blocks bool break bytes_of_lanes case catch char char16_t char32_t char8_t "
    "class co_await co_return co_yield Column COLUMNS Columns columns compl concept const const_cast "
    "consteval constexpr constinit continue count counter Dealt dealt decltype decode default delete do "
    "double DRAWN dynamic_cast elements_of_tile else encode end enum explicit export extend16 extern F false "
    "fetch fill fill_first first float float16 float32 floor fma for fraction friend gather goto Grad halves "
    "halves_of_lanes I i I16 if INFINITY inline int int16_t INT32_MAX INT32_MIN int32_t int64_t int8_t "
    "integer iota joined k KEPT lane Larger larger largest live load long lookup low16 lshr M mask max "
    "maximum memcpy memset middle min min_unsigned minimum mutable namespace NAN narrow narrow_half new no_codes "
    "noexcept NOISE Noise noise not not_eq NULL nullptr operator OPTGEN_EXPORT OPTGEN_GRAD OPTGEN_KERNEL OPTGEN_L1 "
    "OPTGEN_ONCE OPTGEN_SIMD optgen_step or or_eq P pack Part PARTS "
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
    return f"{shortest(value)}f"


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
        return f"{found.helper}({', '.join(self.text(a) for a in found.args)})", ATOM


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
    less = taken_away(y)
    if less is not None and y.args[0] is x and c.op == "eq" and is_const(c.args[1], 0) and c.args[0].op == "and":
        of, mask = c.args[0].args
        # Nothing is taken from what has no bit of the mask.
        if of is x and mask.attr > 0 and mask.attr & -mask.attr == less.attr:
            return f"{p.text(x, 10)} - min(I({p.text(less)}), {p.text(c.args[0])})", 10

    def branch(a: Node) -> str:
        return f"{type_of(a.dtype)}({p.text(a)})" if a.op == "const" else p.text(a)

    return f"where({p.text(c)}, {branch(x)}, {branch(y)})", ATOM


def _limit(name: str) -> Spelling:
    def spell(p: Printer, n: Node) -> Text:
        assert isinstance(p, CppPrinter)
        exact = n.dtype.is_float and p.phases.program.maths == "strict"
        # A number stands first: where the two are equal, zeros of either sign or a NaN, the second one is kept.
        args = sorted(n.args, key=lambda a: not _is_number(a))
        texts = [f"{type_of(a.dtype)}({p.text(a)})" if a.op == "const" else p.text(a) for a in args]
        quick = "at_most" if name == "min" else "at_least"
        called = f"{name}imum" if exact else quick if n.dtype.is_float and _is_number(args[0]) else name
        return f"{called}({', '.join(texts)})", ATOM

    return spell


def _is_number(n: Node) -> bool:
    """Return True for a constant that is no NaN, and for a choice between two."""
    return _is_number(n.args[1]) and _is_number(n.args[2]) if n.op == "where" else n.op == "const" and n.attr == n.attr


def _min(p: Printer, n: Node) -> Text:
    """Spell a minimum; of a pattern and NaN's, in fast maths, the pattern without a NaN's payload.

    The least of two integers would pass negative NaNs on as they are: a GPU never makes one, a CPU keeps what it read.
    """
    x, y = sorted(n.args, key=lambda a: a.op != "bitcast")
    assert isinstance(p, CppPrinter)
    if p.phases.program.maths == "strict":
        return _limit("min")(p, n)
    if x.op == "bitcast" and x.args[0].dtype.name == "f32" and is_const(y, NAN):
        return f"bits_or_nan<N>({f'as_float({p.text(x)})' if x.uid in p.names else p.text(x.args[0])})", ATOM
    return _limit("min")(p, n)


def _cast(p: Printer, n: Node) -> Text:
    (x,) = n.args
    to, of = n.dtype.name, x.dtype.name
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
    return f"{'raw' if n.uid in p.raw else 'load'}({p.phases.place(n)})", ATOM


def _draw(p: Printer, n: Node) -> Text:
    kind, _, width = n.attr
    more = f", {width}" if kind != "integer" else ""
    return f"{kind}<VALUE{more}>(noise)", ATOM


SPELL: dict[str, Spelling] = {
    **dict.fromkeys(_INFIX, _infix),
    "mul": _mul,
    "const": _const,
    "sym": _sym,
    "load": _load,
    "draw": _draw,
    "extent": lambda p, n: (f"extent_{n.attr}", ATOM),
    "neg": lambda p, n: (f"-{p.text(n.args[0], 31)}", 30),
    "not": lambda p, n: (f"~{p.text(n.args[0], 30)}", 30),
    "abs": _call("abs"),
    "min": _min,
    "max": _limit("max"),
    "fma": _call("fma"),
    "where": _choice,
    "sign": _call("sign"),
    "lshr": _call("lshr"),
    "cast": _cast,
    "bitcast": _bitcast,
    "narrow": lambda p, n: p.express(n.args[2]),
    "rint": _call("rint"),
    "floor": _call("floor"),
    "lookup": _table,
    "search": _table,
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
    """

    found: list[Node] = field(default_factory=list)
    blocks: list[Let] = field(default_factory=list)
    elements: list[Let] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    block_stores: list[Store] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    @property
    def roots(self) -> list[Node]:
        """The nodes that the elements' loop computes."""
        ends = [r.args[0] for r in self.reductions] + [wanted(s.node) for s in self.stores]
        return [let.node for let in self.elements] + ends


class Phases:
    """The phases of a sweep: the one that computes each value.  Values of elements are computed again where a later
    phase reads them, from what it was given.

    reserved  names that a value may not have
    head      node -> its name, of nodes that stand before all loops
    raw       uids of loads that stay as they were loaded, such as a byte of each lane
    """

    def __init__(self, schedule: Schedule, reserved: frozenset[str], head: Mapping[int, str] | None = None) -> None:
        sweep = schedule.sweep
        self.program = schedule.program
        self.reserved = reserved
        self.head = dict(head or {})
        self.nodes = list(postorder([*(let.node for let in sweep.lets), *(s.node for s in sweep.stores)]))
        self.name: dict[int, str] = {}
        self._taken = set(reserved) | {f"{b.name}_{x}" for b in self.program.buffers for x in ("at", "packed", "last")}
        # Scalars keep their position; a name that means something here gets another.
        self.scalar = {let.name: self.fresh(let.name) for let in self.program.host}
        self.phases = self._phases(sweep)
        # Loads that the elements' loop reads of blocks are whole numbers, all others stay as they were loaded.
        loads = frozenset(n.uid for n in self.nodes if n.op == "load" and n.dtype.name in _RAW)
        self.raw = loads
        self.raw = loads - {n.uid for phase in self.phases for n in self.of_elements(phase)[0]}
        self._drop_unread()

    def _phases(self, sweep: Sweep) -> list[Phase]:
        """Return the phases with their work; every buffer is read in the first, before any is written."""
        level: dict[int, int] = {}
        for n in self.nodes:
            level[n.uid] = max((level[a.uid] for a in n.args), default=0) + (n.op in BLOCK_LIMITS)
        phases = [Phase() for _ in range(1 + max(level.values(), default=0))]
        for let in sweep.lets:
            if let.node.op not in (*BLOCK_LIMITS, "draw"):
                self._name(let.node, let.name)
                phase = phases[level[let.node.uid]]
                (phase.blocks if let.node.space.name == "block" else phase.elements).append(let)
        for n in (n for n in self.nodes if n.op in BLOCK_LIMITS):
            phases[level[n.args[0].uid]].reductions.append(n)
            phases[level[n.uid]].found.append(n)
            self._name(n, f"{BLOCK_LIMITS[n.op]}_of_block")
        for s in sweep.stores:
            phase = phases[level[s.node.uid]]
            block = self.program.buffer(s.buffer).space.name == "block"
            (phase.block_stores if block else phase.stores).append(s)
        return phases

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

    def place(self, load: Node) -> str:
        """Return the address of what a load reads."""
        return f"{load.attr}_at + {'b' if load.space.name == 'block' else 'i'}"

    def operands(self, n: Node) -> tuple[Node, ...]:
        """Return the nodes that the text of a node reads."""
        found = idiom(n)
        if found is None or found.helper not in _SAID or any(a.uid not in self.raw for a in found.args):
            return n.args
        return found.args

    def _drop_unread(self) -> None:
        """Drop lets that the generated text does not read: a store takes a byte of a word, an idiom what was loaded."""
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

    def walk(self, roots: list[Node], own: Container[int]) -> tuple[list[Node], set[Node]]:
        """Return the named values of blocks that code for `roots` reads, in its order, and what it computes.

        own  uids of the lets among the roots
        """
        read: list[Node] = []
        seen: set[Node] = set()
        stack = list(reversed(roots))
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            is_block = n.space.name == "block" and n.dtype is not dtypes.boolean
            if is_block and n.uid in self.name and n.uid not in own:
                read.append(n)
            else:
                stack.extend(reversed(self.operands(n)))
        return read, seen - set(read)

    def of_elements(self, phase: Phase) -> tuple[list[Node], set[Node]]:
        """Return the values of blocks that the elements' loop of a phase reads, and the nodes that it computes."""
        return self.walk(phase.roots, {let.node.uid for let in phase.elements})


def assigned(plan: Phases, let: Let, printer: CppPrinter) -> tuple[str, str]:
    """Return (code, comment) of a let; from here on its node is spelled as its name."""
    text, _ = printer.express(let.node)
    name = plan.name[let.node.uid]
    printer.names[let.node.uid] = name
    # A type of its own: `auto` would keep a constant a plain number.
    kind = _RAW[let.node.dtype.name] if let.node.uid in plan.raw else type_of(let.node.dtype)
    return f"const {kind} {name} = {text};", comment_of(let)


def stored(plan: Phases, s: Store, printer: CppPrinter, at: str, *, pairs: bool = False) -> str:
    """Return the line of a store; `pairs`: True where the kernel may put two vectors of bytes together (`paired`)."""
    to, node = f"{s.buffer}_at + {at}", s.node
    if node.op in ("const", "sym") or node.space.name == "host":
        return f"store({to}, {type_of(node.dtype)}({printer.text(node)}));"
    if node.uid in plan.raw:
        return f"store({to}, to_int({printer.text(node)}));"
    shifted = _shifted(node)
    if shifted is not None:  # the part that is wanted moves down and out in one permutation
        word, bits, size = shifted
        kind, of, last = f"store_{'byte' if size == 8 else 'half'}", bits // 8, f"{s.buffer}_last"
        if pairs:
            return f"{kind}<{of}, N>({s.buffer}_at, {at}, {printer.text(word)}, {last});"
        return f"{kind}<{of}>({to}, {printer.text(word)});"
    return f"store({to}, {printer.text(node)});"


def paired(stores: Iterable[Store]) -> list[str]:
    """Return the names of what keeps the first vector of two."""
    return [f"{s.buffer}_last" for s in stores if _shifted(s.node) is not None]


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
