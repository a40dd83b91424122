"""cut: a step whose values need statistics of all elements becomes stages: sweeps, and small work between them.

The operands of a statistic are computed in one sweep, its users in a later one; values of rows, columns, matrices and
tensors are computed between two sweeps, and a value that they leave for others (a *temp*) is fp32.  A reduction of
elements is split in three: the sweep leaves partial sums, their finish is the runtime's, and where a tensor is spread
over several machines their sums are added up between the two.

Functions of whole matrices stand between two sweeps like a reduction.  Those of one level are a stage, which torch
computes: it reads matrix states and what sweeps left for each element, leaves values of elements again, and in the last
one stores the matrix states.  A newton_schulz of elements by itself is a *call*: a stage in place, in bf16.  Sums over
the model end a level: they need that level of every parameter.

A value per element that a later sweep needs again is computed again from the stored values, or read back: a state may
be stored by an earlier sweep than its last use, and later sweeps then take its stored value for the new one.  Which of
the two is decided by counting bytes: of all choices the one with the least traffic, and among equals the one that
stores late.

rewrite:
    update u = mul(@g, rsqrt(row_mean(mul(@g, @g))))  ->  sweep 0: partial s = row_sum(mul(@g, @g))
    store p = sub(@p, @u)                                 rows:    temp r = rsqrt(div(%s, #extent.columns))
                                                          sweep 2: update u = mul(@g, %r) ; store p = sub(@p, @u)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from optgen.base.names import unique
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, loads, postorder, unseen
from optgen.ir.program import Buffer, Let, Program, StateValue, Store
from optgen.ir.spell import name_for
from optgen.ops import dtypes, spaces
from optgen.ops.prims import MATRIX_OPS, REDUCTIONS
from optgen.ops.spaces import Space
from optgen.passes.share import nearest

START = -1  # the level of small work before the first sweep
# Spaces of small work, in the order in which a level works on them, and what a stage says of their values.
_OF = {"row": "rows", "col": "columns", "mat": "matrices", "tensor": "tensors",
       "model": "the model"}  # fmt: skip
_ORDER = {space: order for order, space in enumerate(_OF)}
Round = tuple[int, int, int]
"""Level, number within the level, space (by `_ORDER`): rounds are done in this order."""


@dataclass(frozen=True)
class StageProgram:
    """One stage's program, and why it stands apart (ir.program.Stage).

    level  what it waits for: sweeps have even levels, what is done between them with few values odd ones (2)
    """

    program: Program
    level: int
    why: str


def is_small(node: Node) -> bool:
    return node.space.name in spaces.SMALL


def reduces_elements(node: Node) -> bool:
    """Return True if the node depends on a reduction over all elements."""
    return node.op in REDUCTIONS and not is_small(node.args[0]) and node.args[0].space.name not in spaces.MATRICES


def of_matrices(roots: Iterable[Node]) -> dict[int, Node]:
    """Return the nodes (by uid) that are functions of whole matrices, or follow from them without elements."""
    functions: dict[int, Node] = {}
    for node in postorder(roots):
        small = is_small(node) and any(a.uid in functions and a.space != spaces.elem for a in node.args)
        if small or node.op in MATRIX_OPS or node.space.name in spaces.MATRICES:
            functions[node.uid] = node
    return functions


def as_bf16(x: Node) -> Node:
    """x rounded to the nearest bf16, half to even, by its bits; NaN stays."""
    word = ir.op("bitcast", x, attr=dtypes.i32)
    odd = ir.op("and", ir.op("lshr", word, ir.const(16, dtypes.i32)), ir.const(1, dtypes.i32))
    up = ir.op("add", ir.op("add", word, ir.const(0x7FFF, dtypes.i32)), odd)
    word = ir.op("where", ir.op("eq", x, x), up, ir.const(0x7FC00000, dtypes.i32))
    short = ir.op("cast", ir.op("shr", word, ir.const(16, dtypes.i32)), attr=dtypes.i16)
    return ir.op("bitcast", short, attr=dtypes.bf16)


def as_number(x: Node) -> Node:
    """Return what a temp keeps of x: of a condition 1 or 0."""
    return ir.op("where", x, ir.const(1.0), ir.const(0.0)) if x.dtype is dtypes.boolean else x


def read_back(name: str, x: Node) -> Node:
    """Return x as it is read from a temp."""
    kept = ir.load(name, dtypes.f32, x.space)
    return ir.op("lt", ir.const(0.0), kept) if x.dtype is dtypes.boolean else kept


def by_rows(program: Program) -> Program:
    """Make sums of all elements sums of row sums where the program works on rows or columns anyway, and sums over
    a matrix everywhere: one read then serves all of them."""
    nodes = list(postorder(program.roots()))
    matrices = any(n.space.name in ("row", "col", "mat") for n in nodes)

    def rule(node: Node) -> Node:
        if node.op == "model_sum" and node.args[0].space.name != "tensor":
            return ir.op("model_sum", rule(ir.op("tensor_sum", node.args[0])), attr=node.attr)
        if (
            node.op in ("mat_sum", "mat_max")
            and node.args[0].space == spaces.elem
            or (node.op in ("tensor_sum", "tensor_max") and matrices and not is_small(node.args[0]))
        ):
            rows = "row_max" if node.op.endswith("_max") else "row_sum"
            return ir.op(node.op, ir.op(rows, node.args[0]))
        return node

    return program.map(Rewriter(rule))


def levels(roots: Iterable[Node], matrices: Container[int]) -> dict[int, int]:
    """Map nodes (by uid) to the level at which they can first be computed; what is loaded or of the host, to any.

    Sums over the model are taken in the order in which the rule has them, which is that of parameters of every kind.
    """
    of: dict[int, int] = {}
    last = START
    for node in postorder(roots):
        below = max((of[a.uid] for a in node.args), default=START)
        if node.op == "model_sum":
            of[node.uid] = last = max(below + 2, last)
        elif reduces_elements(node):
            of[node.uid] = below + below % 2 + 1
        elif node.uid in matrices:
            of[node.uid] = below + (below % 2 == 0)
        elif node.space == spaces.host or not node.args:
            of[node.uid] = START if is_small(node) or node.space == spaces.host else 0
        elif is_small(node):
            of[node.uid] = below
        else:
            of[node.uid] = max(below + below % 2, 0)
    return of


def _is_gradient(node: Node) -> bool:
    """Return True if a value is the gradient as it comes, or times a host scalar."""
    while node.op in ("cast", "mul", "neg") and sum(a.space != spaces.host for a in node.args) == 1:
        node = next(a for a in node.args if a.space != spaces.host)
    return node.op == "load" and node.attr == "g"


@dataclass
class _Sweep:
    """A sweep with what it turned out to read.

    loads     names of buffers: {"g", "exp_avg_codes"}
    values    small values, from temps
    early     uids of new values that are stored already
    calls     uids of values of functions of matrices
    feasible  False where it would read a buffer that an earlier sweep has overwritten
    """

    level: int
    loads: set[str] = field(default_factory=set)
    values: list[Node] = field(default_factory=list)
    early: set[int] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)
    feasible: bool = True


def _costs(buffers: Iterable[Buffer]) -> dict[str, float]:
    """Bytes per parameter that decide where states are stored: those of 8-bit states and bf16 weights for all plans.

    One rule is then cut into the same sweeps under every plan whose states need no rows and columns; in fp32 and in
    4 bits three of the ready-made rules move up to 2 bytes more than they could (docs/decisions.md).
    """
    moved = {"param": 2.0, "grad": 2.0, "state": 1.03125}
    return {b.name: moved.get(b.role, 0.0) if b.space == spaces.elem else 0.0 for b in buffers}


@dataclass(frozen=True)
class Analysis:
    """The statistics and functions of whole matrices that divide a program, and its stores by who makes them.

    levels    uid -> level: 1 for a norm of the gradient, 2 for elements that are divided by it
    live      the nodes that stores and sums over the model need, operands first
    matrices  uid -> node: functions of whole matrices, and what follows from them without elements
    """

    program: Program
    levels: dict[int, int]
    live: tuple[Node, ...]
    matrices: dict[int, Node]

    def level(self, node: Node) -> int:
        return self.levels[node.uid]

    @cached_property
    def reductions(self) -> list[Node]:
        """The reductions over all elements."""
        return [n for n in self.live if reduces_elements(n)]

    @cached_property
    def calls(self) -> list[Node]:
        """The newton_schulz of values of elements, which take the place of their operands, each a stage."""
        read = {a.uid for n in self.live if n.uid in self.matrices for a in n.args}
        calls = [n for n in self.live if n.op == "call" and n.attr == "newton_schulz" and n.space == spaces.elem]
        return [n for n in calls if n.args[0].uid not in self.matrices and n.uid not in read]

    @cached_property
    def functions(self) -> list[Node]:
        """The other functions of whole matrices, and what follows from them without elements."""
        return [n for n in self.live if n.uid in self.matrices and n not in self.calls]

    @cached_property
    def operands(self) -> list[Node]:
        """The values that these read of other stages."""
        return list(dict.fromkeys(a for n in self.functions for a in n.args if a.uid not in self.matrices))

    @property
    def large_operands(self) -> list[Node]:
        return [a for a in self.operands if a.space == spaces.elem]

    @property
    def small_operands(self) -> list[Node]:
        return [a for a in self.operands if is_small(a) and a.args]

    @cached_property
    def results(self) -> list[Node]:
        """The values of functions that sweeps, small work or functions of a later level read."""
        read = {s.node.uid for s in self.program.stores if s not in self.matrix_stores}
        for n in self.live:
            read |= {a.uid for a in n.args if n.uid not in self.matrices or self.level(a) < self.level(n)}
        return [n for n in self.functions if n.uid in read and n.args and n.space.name not in spaces.MATRICES]

    def stores_in(self, names: Container[str]) -> list[Store]:
        """Return the stores to buffers of these spaces."""
        return [s for s in self.program.stores if self.program.buffer(s.buffer).space.name in names]

    @cached_property
    def matrix_stores(self) -> list[Store]:
        return self.stores_in(spaces.MATRICES)

    @cached_property
    def stores(self) -> dict[str, list[Store]]:
        """Owner -> stores of elements."""
        stores: dict[str, list[Store]] = {}
        for s in self.stores_in({"elem", "block"}):
            stores.setdefault(self.program.buffer(s.buffer).owner, []).append(s)
        return stores

    @cached_property
    def kept(self) -> dict[str, StateValue]:
        """Owner -> state whose new value a later sweep may read back."""
        # A new value that is just the gradient is not worth reading back in another format.
        return {k.owner: k for k in self.program.kept if not _is_gradient(k.new)}


def analyse(program: Program) -> Analysis:
    """Return what the cut of a program depends on."""
    roots = [*program.sums, *program.roots(), *(k.old for k in program.kept), *(k.new for k in program.kept)]
    matrices = of_matrices(roots)
    live = postorder([*(s.node for s in program.stores), *program.sums])
    return Analysis(program, levels(roots, matrices), live, matrices)


class Names:
    """The names of the buffers of small values and values of matrices: the author's where a line is the value."""

    def __init__(self, of: Analysis) -> None:
        self.program, self.matrices = of.program, of.matrices
        lets = [let for let in self.program.body if is_small(let.node) or let.node.uid in self.matrices]
        self.lines = {let.node.uid: let.name for let in reversed(lets)}  # the author's first one that is the value
        # Programs of one step agree on a sum over the model by its name, so that depends on no store.
        lines = postorder(let.node for let in self.program.body)
        self.users, self.line_users = ({a.uid: n for n in reversed(x) for a in n.args} for x in (of.live, lines))
        self.names: dict[int, str] = {}
        self.taken = {b.name for b in self.program.buffers} | set(self.program.hypers)
        for n in (*self.program.sums, *of.live):
            is_left = (is_small(n) or n.uid in self.matrices) and n.args and n.space.name not in spaces.MATRICES
            if n.uid not in self.names and is_left:
                self._add(n, self.lines.get(n.uid) or self._described(n))
        names = {let.node.uid: let.name for let in self.program.body}
        for n in of.large_operands:
            self._add(n, f"{names.get(n.uid, 'operand')}_whole")

    def _add(self, node: Node, base: str) -> None:
        name = self.names[node.uid] = unique(base, self.taken)
        self.taken.add(name)

    def _described(self, node: Node) -> str:
        """Return row_sum_for_<the nearest name above the node>, or the node as it reads."""
        if node.uid in self.matrices:
            return str(node.attr or node.op)
        if node.op not in REDUCTIONS:
            return name_for(node, f"{node.space.name}_{node.op}", {**self.lines, **self.names})
        if above := self._above(node):
            return f"{node.op}_for_{above}"
        lets = {let.node.uid: let.name for let in self.program.body if let.stage == "update"}
        return f"{node.op}_of_{below}" if (below := nearest(node, lets)) else node.op

    def _above(self, node: Node) -> str:
        """Return the first name among the small values that follow from a node."""
        users = self.line_users if node.op == "model_sum" else self.users
        user: Node | None = node
        while user is not None and user.uid not in self.lines:
            user = users.get(user.uid)
            if user is not None and not is_small(user):
                return ""
        return self.lines[user.uid] if user is not None else ""


class Cutter:
    """The sweeps of one program: which stores each makes, and their programs."""

    def __init__(self, of: Analysis) -> None:
        self.of, self.program, self.level = of, of.program, of.level
        self.names = Names(of).names
        self.size = _costs(self.program.buffers)

    # -- which sweep stores what

    def groups(self) -> list[list[str]]:
        """Return the owners whose stores need the same sweep: those that may be encoded relative to one another."""
        groups: list[list[str]] = []
        pairs = {*self.program.together, *((b, a) for a, b in self.program.together)}
        for owner in self.of.stores:
            near = [g for g in groups if any((owner, o) in pairs for o in g)]
            merged = [owner, *(o for g in near for o in g)]
            groups = [g for g in groups if g not in near] + [merged]
        return groups

    def sweeps(self, at: Mapping[str, int], last: int) -> list[_Sweep]:
        """Return the sweeps up to level `last` where owner o's stores stand at level at[o]."""
        out = []
        for level in range(0, last + 1, 2):
            roots = [r.args[0] for r in (*self.of.reductions, *self.of.calls) if self.level(r) == level + 1]
            roots += [x for x in self.of.large_operands if self.level(x) == level]
            roots += [s.node for o, ss in self.of.stores.items() if at[o] == level for s in ss]
            if roots:
                out.append(self._look(level, roots, at))
        return out

    def _early(self, at: Mapping[str, int], level: int) -> list[StateValue]:
        """Return the states whose new value is stored before a level, to be read back there."""
        return [self.of.kept[o] for o in at if at[o] < level and o in self.of.kept]

    def _look(self, level: int, roots: list[Node], at: Mapping[str, int]) -> _Sweep:
        """Return a sweep with the values that it reads: early states from what was stored, small values from temps."""
        early = {k.new.uid: k for k in self._early(at, level)}
        gone = {b.name for b in self.program.buffers if at.get(b.owner, level) < level}
        sweep = _Sweep(level)
        seen: set[int] = set()
        stack = list(reversed(roots))
        while stack:
            node = stack.pop()
            if node.uid in seen:
                continue
            seen.add(node.uid)
            if node.uid in early:
                sweep.loads |= set(loads([early[node.uid].old]))
                sweep.early.add(node.uid)
            elif node.uid in self.of.matrices:
                sweep.calls.add(node.uid)
            elif is_small(node) and node.args:
                sweep.values.append(node)
            elif node.op == "load":
                sweep.feasible &= is_small(node) or node.attr not in gone
                sweep.loads.add(node.attr)
            else:
                stack.extend(reversed(node.args))
        return sweep

    def choices(self) -> Iterator[tuple[tuple[float, int, int], list[_Sweep], dict[str, int]]]:
        """Yield the possible sweeps, with the level at which each owner's stores stand.

        Their cost comes first: bytes per parameter that they read, states read back, and how early stores stand.
        """
        groups = self.groups()
        first = [max(self.level(s.node) for o in g for s in self.of.stores[o]) for g in groups]
        first = [level + level % 2 for level in first]  # of sweeps, which can store these values
        before = [self.level(r) - 1 for r in (*self.of.reductions, *self.of.calls)]
        last = max([*first, *before, *map(self.level, self.of.large_operands)], default=0)
        for levels in itertools.product(*(range(start, last + 1, 2) for start in first)):
            at = {o: level for g, level in zip(groups, levels, strict=True) for o in g}
            sweeps = self.sweeps(at, last)
            if all(s.feasible for s in sweeps):
                moved = sum(2.0 * len(s.calls) + sum(self.size[b] for b in s.loads) for s in sweeps)
                early = sum(self.reads_back(s, o, at) for s in sweeps for o in at)
                yield (moved, early, -sum(levels) if early else sum(levels)), sweeps, at

    def reads_back(self, sweep: _Sweep, owner: str, at: Mapping[str, int]) -> bool:
        """Return True if a sweep reads the new value of a state from where an earlier one has stored it."""
        return at[owner] < sweep.level and owner in self.of.kept and self.of.kept[owner].new.uid in sweep.early

    # -- programs

    def piece(self, sweep: _Sweep, at: Mapping[str, int], small: SmallWork, *, is_last: bool) -> StageProgram:
        """Return the sweep's own program."""
        early = {k.new: k.old for k in self._early(at, sweep.level)}
        mapped = Rewriter(lambda node: node)
        memo = mapped.memo
        memo |= {value: small.read(value) for value in sweep.values}
        memo |= {x: self.read_call(x) for x in (*self.of.calls, *self.of.results) if x.uid in sweep.calls} | early
        left = list(self._left(sweep.level, small, mapped))
        stores = [Store(buffer.name, value) for buffer, value in left]
        stores += [
            Store(s.buffer, mapped(s.node)) for o, ss in self.of.stores.items() if at[o] == sweep.level for s in ss
        ]

        def new(let: Let) -> Node | None:
            return None if let.node in early else memo.get(let.node)

        why = self._why(sweep.level) if left else "the update" if is_last else "stores"
        program = self.program_of(stores, new, [buffer for buffer, _ in left], spaces.elem)
        return StageProgram(program, sweep.level, why)

    def _left(self, level: int, small: SmallWork, mapped: Rewriter) -> Iterator[tuple[Buffer, Node]]:
        """Yield the buffers that a sweep leaves for stages between it and the next one, and their values."""
        for r in self.of.reductions:
            if self.level(r) == level + 1:
                name = small.name(r)
                yield Buffer(name, dtypes.f32, r.space, "partial", name, False, True, r.op), mapped(r.args[0])
        for c in self.of.calls:
            if self.level(c) == level + 1:
                name = self.names[c.uid]
                yield Buffer(name, dtypes.bf16, spaces.elem, "temp", name, False, True), as_bf16(mapped(c.args[0]))
        for x in self.of.large_operands:
            if self.level(x) == level:
                yield self._temp(x), mapped(x)

    def read_call(self, node: Node) -> Node:
        """Return the load by which a later stage reads a value of functions of whole matrices."""
        if node not in self.of.calls:
            return read_back(self.names[node.uid], node)
        return ir.op("cast", ir.load(self.names[node.uid], dtypes.bf16, spaces.elem), attr=dtypes.f32)

    def call_pieces(self) -> list[StageProgram]:
        """Return a stage for every call: a program whose one store is the call, in place."""
        out = []
        for c in self.of.calls:
            name = self.names[c.uid]
            call = ir.op("call", self.read_call(c), *c.args[1:], attr=c.attr)
            buffer = Buffer(name, dtypes.bf16, spaces.elem, "temp", name)
            stored = Store(name, ir.op("cast", call, attr=dtypes.bf16))
            program = self.program_of([stored], lambda let: None, [buffer], spaces.elem)
            out.append(StageProgram(program, self.level(c), f"{c.attr} of whole matrices"))
        return out

    def _temp(self, node: Node) -> Buffer:
        """Return the buffer of a value that is left for functions of whole matrices, or that they leave."""
        return Buffer(self.names[node.uid], dtypes.f32, node.space, "temp", self.names[node.uid], False, True)

    def matrix_pieces(self, small: SmallWork) -> list[StageProgram]:
        """Return a stage for every level that has functions of whole matrices; the last one stores matrix states."""
        levels = {self.level(x) for x in self.of.results}
        if self.of.matrix_stores:
            levels.add(max([*levels, *(self.level(s.node) for s in self.of.matrix_stores)]))
        out = []
        for level in sorted(levels):
            memo = {x: ir.load(self.names[x.uid], dtypes.f32, spaces.elem) for x in self.of.large_operands}
            memo |= {x: small.read(x) for x in self.of.small_operands}
            memo |= {x: self.read_call(x) for x in self.of.results if self.level(x) < level}
            mapped = Rewriter(lambda node: node)
            mapped.memo |= memo
            left = [x for x in self.of.results if self.level(x) == level]
            stores = [Store(self.names[x.uid], as_number(mapped(x))) for x in left]
            if level == max(levels):
                stores += [Store(s.buffer, mapped(s.node)) for s in self.of.matrix_stores]

            def new(let: Let, mapped: Rewriter = mapped) -> Node | None:
                return mapped(let.node) if let.node.uid in self.of.matrices else None

            program = self.program_of(stores, new, [self._temp(x) for x in left], spaces.whole)
            out.append(StageProgram(program, level, "functions of whole matrices"))
        return out

    def program_of(
        self, stores: list[Store], new: Callable[[Let], Node | None], temps: list[Buffer], space: Space
    ) -> Program:
        """Return a program over these stores, with the buffers that it touches.

        new  let -> what its value became, None where it is not computed here
        """
        nodes = postorder(s.node for s in stores)
        seen, lets = {n.uid for n in nodes}, []
        for let in self.program.body:
            if let.node.space == spaces.host:
                lets.append(let)
            elif (node := new(let)) is not None and node.uid in seen and node.op != "load":
                lets.append(replace(let, node=node))
        buffers = tuple(_touched((*self.program.buffers, *temps), stores))
        return replace(
            self.program, buffers=buffers, body=tuple(lets), stores=tuple(stores), space=space, kept=(),
            host_stores=(), sums=(),
        )  # fmt: skip

    def _why(self, level: int) -> str:
        """Return the author's lines for which a sweep leaves something: "r_factor (line 7), u (line 12)"."""
        seen: set[Node] = set()
        lines = {n: let for let in self.program.body for n in unseen(let.node, seen)}  # of each node the first one
        users = []
        for r in (*self.of.reductions, *self.of.calls, *self.of.results):
            if self.level(r) == level + 1:
                let = lines.get(r)
                name = str(r.attr) if r.op == "call" else r.op
                users.append(f"{let.name} ({let.loc.short})" if let and let.loc else name)
        return ", ".join(dict.fromkeys(users))


def _touched(known: Iterable[Buffer], stores: list[Store]) -> Iterator[Buffer]:
    """Yield the buffers of a program over these stores; those that it reads and that are not known are temps."""
    loaded = {n.attr: n for n in postorder(s.node for s in stores) if n.op == "load"}
    written = {s.buffer for s in stores}
    for b in known:
        read = loaded.pop(b.name, None) is not None
        if read or b.name in written:
            yield replace(b, reads=read, writes=b.name in written)
    for name, n in loaded.items():
        yield Buffer(name, n.dtype, n.space, "temp", name, True, False)


class SmallWork:
    """The work between sweeps: which small values exist when, and in which order they are made.

    A round runs over one space.  Within a level, a value of another space, or a reduction of the same one, belongs to
    a later round.
    """

    def __init__(self, cutter: Cutter, sweeps: list[_Sweep]) -> None:
        self.cutter, self.sweeps = cutter, sweeps
        self.stores = cutter.of.stores_in(spaces.SMALL)
        self.rounds: dict[Round, list[Node]] = {}
        self.home: dict[int, Round] = {}  # node uid -> the first round that makes it
        self.temps: set[int] = set()  # uids of values that later rounds read
        self.commits: dict[Round, list[Store]] = {}  # the stores of small states
        self.state: dict[int, str] = {}  # node uid -> the state buffer that holds it from its round on
        for at, roots in sorted(self._roots().items()):
            self._arrange(at, roots)
        for s, key in zip(self.stores, self._store_rounds(), strict=True):
            self.commits.setdefault(key, []).append(s)
            if key == self.home.get(s.node.uid) and s.node.dtype is dtypes.f32:
                self.state[s.node.uid] = s.buffer

    def _due(self, node: Node) -> int:
        """Return the level that makes a value; a sum over the model is begun a level before it is there."""
        return self.cutter.level(node) - (2 if node.op == "model_sum" else 0)

    def _wanted(self) -> list[tuple[Node, int]]:
        """Return what sweeps, stores and functions of matrices read, and the levels that make it."""
        of, first = self.cutter.of, min((s.level + 1 for s in self.sweeps), default=START)
        wanted = [(v, self._due(v)) for s in self.sweeps for v in s.values]
        wanted += [(s.node, max(of.level(s.node), first)) for s in self.stores if s.node.args]
        return wanted + [(n, self._due(n)) for n in (*of.small_operands, *reversed(of.program.sums))]

    def _roots(self) -> dict[int, list[Node]]:
        """Return level -> the values that are needed from it."""
        stack = self._wanted()
        roots: dict[int, dict[Node, None]] = {}
        while stack:
            node, at = stack.pop()
            if node in roots.setdefault(at, {}):
                continue
            roots[at][node] = None
            read = (a for n in self._inside(node, at) for a in n.args if is_small(a) and a.args)
            stack += [(a, self._due(a)) for a in read if self._is_before(a, at)]
        return {at: list(nodes) for at, nodes in roots.items()}

    def _is_before(self, node: Node, at: int) -> bool:
        """Return True if a small value is read at a level, not made."""
        return START < self.cutter.level(node) < at or node.op == "model_sum"

    def _inside(self, root: Node, at: int) -> list[Node]:
        """Return the small operations below root that are done at that level, operands first."""

        def is_read(n: Node) -> bool:
            kept = not is_small(n) or not n.args or reduces_elements(n)
            return kept or (n is not root and self._is_before(n, at))

        return unseen(root, {n for n in postorder([root]) if is_read(n)})

    def _arrange(self, at: int, roots: list[Node]) -> None:
        """Divide the work of one level into rounds."""
        nodes = {n.uid: n for root in roots for n in self._inside(root, at)}
        depth = self._depths(roots, nodes)

        def round_of(n: Node) -> Round:
            return at, depth.get(n.uid, 0), _ORDER[n.space.name]

        for uid, n in nodes.items():
            key = round_of(n.args[0] if n.op in REDUCTIONS else n)
            self.rounds.setdefault(key, []).append(n)
            self.home.setdefault(uid, key)
        for uid, n in nodes.items():
            mine = self.home[uid] if n.op in REDUCTIONS else round_of(n)
            for a in n.args:
                # A value of another round is read from memory; a reduction always is.
                if a.uid in nodes and (a.op in REDUCTIONS or self.home[a.uid] != mine):
                    self.temps.add(a.uid)
        self.temps.update(root.uid for root in roots)

    @staticmethod
    def _depths(roots: list[Node], nodes: Mapping[int, Node]) -> dict[int, int]:
        """Return node uid -> number within the level of the round that has all of its operands."""
        depth: dict[int, int] = {}
        for n in (n for n in postorder(roots) if n.uid in nodes):
            read = [a for a in n.args if a.uid in nodes]
            least = max((depth[a.uid] + (a.space != n.space and a.op not in REDUCTIONS) for a in read), default=0)
            depth[n.uid] = least + 1 if n.op in REDUCTIONS else least
        summed = {n.args[0].uid for n in nodes.values() if n.op == "model_sum"}  # over the model, in one round
        return depth | dict.fromkeys(summed, max((depth.get(x, 0) for x in summed), default=0))

    def _store_rounds(self) -> list[Round]:
        """Return the round of each store of a small state: the first at whose end nothing reads the old value any more,
        and not before that of a state which is given the old value."""
        floors = {s.buffer: self._floor(s) for s in self.stores}
        keys: dict[str, Round] = {}
        changed = True
        while changed:
            changed = False
            for s in self.stores:
                handed = [o for o in self.stores if o is not s and o.node.op == "load" and o.node.attr == s.buffer]
                floor = floors[s.buffer] = max([floors[s.buffer], *(keys.get(o.buffer, (0, 0, 0)) for o in handed)])
                space = self._order(s)
                fitting = [k for k in self.rounds if k[2] == space and k >= floor]
                key = min(fitting, default=(floor[0], floor[1], space))
                if keys.get(s.buffer) != key:
                    keys[s.buffer], changed = key, True
        return [keys[s.buffer] for s in self.stores]

    def _order(self, s: Store) -> int:
        return _ORDER[self.cutter.program.buffer(s.buffer).space.name]

    def _floor(self, s: Store) -> Round:
        """Return the first round that has a store's value and after which no work reads what it replaces."""
        space, level, matrices = self._order(s), self.cutter.level, self.cutter.of.matrices.values()

        def is_read(nodes: Iterable[Node]) -> bool:
            return any(a.op == "load" and a.attr == s.buffer for n in nodes for a in n.args)

        floor = self.home.get(s.node.uid) or (max(min(x.level for x in self.sweeps) + 1, level(s.node)), 0, space)
        for sweep in self.sweeps:
            if s.buffer in sweep.loads:
                floor = max(floor, (sweep.level + 1, 0, space))
        if is_read(matrices):
            floor = max(floor, (max(map(level, matrices)) + 2, 0, space))
        readers = [key for key, nodes in self.rounds.items() if is_read(nodes)]
        return max([floor, *(key if key[2] == space else (key[0], key[1] + 1, space) for key in readers)])

    def name(self, node: Node) -> str:
        """Return the buffer in which later stages find a value."""
        return self.state.get(node.uid) or self.cutter.names[node.uid]

    def read(self, node: Node) -> Node:
        """Return what a later stage reads for a value."""
        return read_back(self.name(node), node)

    def pieces(self) -> list[StageProgram]:
        """Return a program for every round that stores something."""
        pieces = map(self._round, sorted({*self.rounds, *self.commits}))
        return [piece for piece in pieces if piece is not None]

    def _round(self, key: Round) -> StageProgram | None:
        at, space = key[0], list(_OF)[key[2]]
        nodes = self.rounds.get(key, [])
        here = {n for n in nodes if n.op not in REDUCTIONS}
        memo: dict[int, Node] = {}

        def mapped(node: Node) -> Node:
            if node.uid not in memo:
                inside = node in here or node.space == spaces.host
                kept = ir.rebuild(node, map(mapped, node.args)) if inside and node.args else node
                memo[node.uid] = kept if inside or not node.args else self.read(node)
            return memo[node.uid]

        stores, temps = [], []
        for n in nodes:
            name = self.name(n)
            if n.op in REDUCTIONS:
                temps.append(Buffer(name, dtypes.f32, n.space, "partial", name, False, True, n.op))
                stores.append(Store(name, mapped(n.args[0])))
            elif n.uid in self.temps and n.uid not in self.state and self.home[n.uid] == key:
                temps.append(Buffer(name, dtypes.f32, n.space, "temp", name, False, True))
                stores.append(Store(name, as_number(mapped(n))))
        stores += [Store(s.buffer, mapped(s.node)) for s in self.commits.get(key, ())]
        if not stores:
            return None
        program = self.cutter.program_of(stores, lambda let: memo.get(let.node.uid), temps, Space(space))
        return StageProgram(program, at, f"values of {_OF[space]}")


def cut(program: Program) -> tuple[list[StageProgram], tuple[str, ...]]:
    """Return the stages in their order, and the states that are stored before the last sweep that needs them."""
    cutter = Cutter(analyse(by_rows(program)))
    _, sweeps, at = min(cutter.choices(), key=lambda choice: choice[0])
    small = SmallWork(cutter, sweeps)
    pieces = [cutter.piece(s, at, small, is_last=s is sweeps[-1]) for s in sweeps]
    pieces += small.pieces() + cutter.call_pieces() + cutter.matrix_pieces(small)
    early = tuple(o for o in at if any(cutter.reads_back(s, o, at) for s in sweeps))
    few = any(b.space.name in spaces.SMALL for b in program.buffers)
    if len(pieces) == 1 and not few and not pieces[0].program.is_sized:  # one kernel, whose table has every buffer
        (only,) = pieces
        touched = {b.name: b for b in only.program.buffers}
        buffers = tuple(touched.get(b.name, replace(b, reads=False, writes=False)) for b in program.buffers)
        pieces = [replace(only, program=replace(only.program, buffers=buffers))]
    return sorted(pieces, key=lambda p: p.level), early
