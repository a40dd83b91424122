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
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from optgen.base.names import unique
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, loads, postorder
from optgen.ir.program import Buffer, Let, Program, Store
from optgen.ir.spell import name_for
from optgen.ops import dtypes, spaces
from optgen.ops.prims import MATRIX_OPS, REDUCTIONS
from optgen.ops.spaces import Space

START = -1  # the level of small work before the first sweep
# Spaces of small work, in the order in which a level works on them, and what a stage says of their values.
_OF = {"row": "rows", "col": "columns", "axis": "the columns' dimensions", "mat": "matrices", "tensor": "tensors",
       "model": "the model"}  # fmt: skip
_ORDER = {space: order for order, space in enumerate(_OF)}
Round = tuple[int, int, int]
"""Level, number within the level, space (by `_ORDER`): rounds are done in this order."""


@dataclass(frozen=True)
class StageProgram:
    """One stage's program; see ir.program.Stage for level and why."""

    program: Program
    level: int
    why: str


@dataclass(frozen=True)
class Cut:
    """The pieces in their order, and the states that are stored before the last sweep that needs them."""

    pieces: tuple[StageProgram, ...]
    early: tuple[str, ...] = ()


def is_small(node: Node) -> bool:
    return node.space.name in spaces.SMALL


def reduces_elements(node: Node) -> bool:
    """Return True if the node depends on a reduction over all elements."""
    return node.op in REDUCTIONS and not is_small(node.args[0]) and node.args[0].space.name not in spaces.MATRICES


def of_matrices(roots: Iterable[Node]) -> dict[int, Node]:
    """Return the nodes (by uid) that are functions of whole matrices, or follow from them without elements."""
    found: dict[int, Node] = {}
    for node in postorder(roots):
        small = is_small(node) and any(a.uid in found and a.space != spaces.elem for a in node.args)
        if small or node.op in MATRIX_OPS or node.space.name in spaces.MATRICES:
            found[node.uid] = node
    return found


def needs_cutting(program: Program) -> bool:
    """Return True if anything lives in a space between host and elements, or is computed outside of kernels."""
    if program.sums or any(b.space.name in spaces.SMALL for b in program.buffers):
        return True
    nodes = postorder(s.node for s in program.stores)
    return any(is_small(n) or n.op in MATRIX_OPS or n.space.name in spaces.MATRICES for n in nodes)


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


class Levels:
    """Node -> the level at which it can first be computed; what is loaded or known on the host, at any.

    Sums over the model are taken in the order in which the rule has them, which is that of parameters of every kind.
    """

    def __init__(self, roots: Iterable[Node], matrices: Container[int]) -> None:
        self.of: dict[int, int] = {}
        last = START
        for node in postorder(roots):
            below = max((self.of[a.uid] for a in node.args), default=START)
            if node.op == "model_sum":
                self.of[node.uid] = last = max(below + 2, last)
            elif reduces_elements(node):
                self.of[node.uid] = below + below % 2 + 1
            elif node.uid in matrices:
                self.of[node.uid] = below + (below % 2 == 0)
            elif node.space in (spaces.host,) or not node.args:
                self.of[node.uid] = START if is_small(node) or node.space == spaces.host else 0
            elif is_small(node):
                self.of[node.uid] = below
            else:
                self.of[node.uid] = max(below + below % 2, 0)

    def __call__(self, node: Node) -> int:
        return self.of[node.uid]


def _is_gradient(node: Node) -> bool:
    """Return True if a value is the gradient as it comes, or times a host scalar."""
    while node.op in ("cast", "mul", "neg") and sum(a.space != spaces.host for a in node.args) == 1:
        node = next(a for a in node.args if a.space != spaces.host)
    return node.op == "load" and node.attr == "g"


@dataclass
class _Sweep:
    """A sweep as it is being put together: its roots, and what it turned out to read."""

    level: int
    roots: list[Node]
    loads: set[str]
    values: list[Node]  # small values that it needs
    nodes: list[Node]
    calls: set[int]
    feasible: bool = True


def _costs(buffers: Iterable[Buffer]) -> dict[str, float]:
    """Bytes per parameter that decide where states are stored: those of 8-bit states and bf16 weights for all plans.

    One rule is then cut into the same sweeps under every plan whose states need no rows and columns; in fp32 and in
    4 bits three of the ready-made rules move up to 2 bytes more than they could (docs/decisions.md).
    """
    moved = {"param": 2.0, "grad": 2.0, "state": 1.03125}
    return {b.name: moved.get(b.role, 0.0) if b.space == spaces.elem else 0.0 for b in buffers}


class Cutter:
    """The cutting of one program; every method is one decision."""

    def __init__(self, program: Program) -> None:
        self.program = program
        roots = [*program.sums, *program.roots(), *(k.old for k in program.kept), *(k.new for k in program.kept)]
        self.matrices = of_matrices(roots)
        self.level = Levels(roots, self.matrices)
        self.size = _costs(program.buffers)
        self.buffers = {b.name: b for b in program.buffers}
        live = list(postorder([*(s.node for s in program.stores), *program.sums]))
        self.reductions = [n for n in live if reduces_elements(n)]
        self.matrix_stores = [s for s in program.stores if self.buffers[s.buffer].space.name in spaces.MATRICES]
        whole = [n for n in live if n.uid in self.matrices]
        inner = {a.uid for n in whole for a in n.args}
        self.calls = [n for n in whole if self._is_alone(n) and n.uid not in inner]
        of_elements = [a for n in whole if n not in self.calls for a in n.args if a.uid not in self.matrices]
        self.operands = list(dict.fromkeys(a for a in of_elements if a.space == spaces.elem))
        self.given = list(dict.fromkeys(a for a in of_elements if is_small(a) and a.args))
        read = {a.uid for n in live if n.uid not in self.matrices for a in n.args}
        read |= {s.node.uid for s in program.stores if s not in self.matrix_stores}
        read |= {a.uid for n in whole for a in n.args if a.uid in self.matrices and self.level(a) < self.level(n)}
        self.results = [n for n in whole if n not in self.calls and n.args and n.space.name not in spaces.MATRICES
                        and n.uid in read]  # fmt: skip
        self.crossing = (*self.reductions, *self.calls, *self.results)
        self.stores: dict[str, list[Store]] = {}
        for s in program.stores:
            if not self._is_small_store(s) and s not in self.matrix_stores:
                self.stores.setdefault(self.buffers[s.buffer].owner, []).append(s)
        # A new value that is just the gradient is not worth reading back in another format.
        self.kept = {k.owner: k for k in program.kept if not _is_gradient(k.new)}
        self.names = self._names(live)
        self.first_users = self._first_users()

    def _is_alone(self, node: Node) -> bool:
        """Return True for a newton_schulz of a value of elements, which takes the place of its operand."""
        return node.attr == "newton_schulz" and node.space == spaces.elem and node.args[0].uid not in self.matrices

    def _first_users(self) -> dict[int, Let]:
        """Map reductions and calls (by uid) to the first line of the author that needs them."""
        crossing = {n.uid for n in self.crossing}
        below: dict[int, frozenset[int]] = {}
        out: dict[int, Let] = {}
        for n in postorder(let.node for let in self.program.body):
            found = frozenset().union(*(below[a.uid] for a in n.args))
            below[n.uid] = found | {n.uid} if n.uid in crossing else found
        for let in self.program.body:
            for uid in below[let.node.uid]:
                out.setdefault(uid, let)
        return out

    def _is_small_store(self, s: Store) -> bool:
        return self.buffers[s.buffer].space.name in spaces.SMALL

    def _names(self, live: list[Node]) -> dict[int, str]:
        """Return the names of small values: the author's where a line of theirs is the value."""
        named: dict[int, str] = {}
        for let in self.program.body:
            if is_small(let.node) or let.node.uid in self.matrices:
                named.setdefault(let.node.uid, let.name)
        taken = {b.name for b in self.program.buffers} | set(self.program.hypers)
        out: dict[int, str] = {}
        users: dict[int, Node] = {}
        for n in live:
            for a in n.args:
                users.setdefault(a.uid, n)
        # Programs of one step agree on a sum over the model by its name, so that depends on no store.
        lines: dict[int, Node] = {}
        for n in postorder(let.node for let in self.program.body):
            for a in n.args:
                lines.setdefault(a.uid, n)
        for n in (*self.program.sums, *live):
            small = is_small(n) or n.uid in self.matrices
            if n.uid in out or not small or not n.args or n.space.name in spaces.MATRICES:
                continue
            base = named.get(n.uid) or self._described(n, named, lines if n.op == "model_sum" else users, out)
            name = out[n.uid] = unique(base, taken)
            taken.add(name)
        own = {let.node.uid: let.name for let in self.program.body}
        for n in self.operands:
            name = out[n.uid] = unique(f"{own.get(n.uid) or 'operand'}_whole", taken)
            taken.add(name)
        return out

    def _described(
        self, node: Node, named: Mapping[int, str], users: Mapping[int, Node], out: Mapping[int, str]
    ) -> str:
        """row_sum_for_<the nearest name above it>, or as it reads."""
        user: Node | None = node
        while user is not None and user.uid not in named:
            user = users.get(user.uid)
            if user is not None and not is_small(user):
                user = None
        if node.uid in self.matrices:
            return str(node.attr or node.op)
        if node.op == "axis_min":
            (x,) = node.args
            return f"{x.attr if x.op == 'load' else named.get(x.uid) or out[x.uid]}_spread"
        if node.op not in REDUCTIONS:
            return name_for(node, f"{node.space.name}_{node.op}", {**named, **out})
        if user is not None and user.uid in named:
            return f"{node.op}_for_{named[user.uid]}"
        return f"{node.op}_of_{below}" if (below := self._nearest(node)) else node.op

    def _nearest(self, node: Node) -> str:
        """The first name below a node that its author or a state gave."""
        names = {let.node.uid: let.name for let in self.program.body if let.stage == "update"}
        level = list(node.args)
        while level:
            for n in level:
                if n.uid in names:
                    return names[n.uid]
                if n.op == "load":
                    return str(n.attr)
            level = [a for n in level for a in n.args]
        return ""

    # -- which sweep stores what

    def groups(self) -> list[list[str]]:
        """Return the owners whose stores need the same sweep: those that may be encoded relative to one another."""
        groups: list[list[str]] = []
        pairs = {*self.program.together, *((b, a) for a, b in self.program.together)}
        for owner in self.stores:
            near = [g for g in groups if any((owner, o) in pairs for o in g)]
            merged = [owner, *(o for g in near for o in g)]
            groups = [g for g in groups if g not in near] + [merged]
        return groups

    def sweeps(self, at: Mapping[str, int]) -> list[_Sweep]:
        """The sweeps where owner o's stores stand at level at[o]."""
        out = []
        last = max([*at.values(), *self._before()], default=0)
        for level in range(0, last + 1, 2):
            roots = [r.args[0] for r in (*self.reductions, *self.calls) if self.level(r) == level + 1]
            roots += [x for x in self.operands if self.level(x) == level]
            roots += [s.node for o, ss in self.stores.items() if at[o] == level for s in ss]
            if roots:
                out.append(self._look(level, roots, at))
        return out

    def _before(self) -> list[int]:
        """The levels of sweeps that something between sweeps needs."""
        return [self.level(r) - 1 for r in (*self.reductions, *self.calls)] + [self.level(x) for x in self.operands]

    def _look(self, level: int, roots: list[Node], at: Mapping[str, int]) -> _Sweep:
        """Return a sweep with the values that it reads: early states from what was stored, small values from temps."""
        early = {self.kept[o].new.uid: o for o in at if at[o] < level and o in self.kept}
        gone = {b.name for b in self.program.buffers if at.get(b.owner, level) < level}
        sweep = _Sweep(level, roots, set(), [], [], set())
        seen: set[int] = set()
        stack = list(reversed(roots))
        while stack:
            node = stack.pop()
            if node.uid in seen:
                continue
            seen.add(node.uid)
            if node.uid in early:
                sweep.loads |= set(loads([self.kept[early[node.uid]].old]))
                sweep.nodes.append(node)
                continue
            if node.uid in self.matrices:
                sweep.nodes.append(node)
                sweep.calls.add(node.uid)
                continue
            if is_small(node):
                if node.args:
                    sweep.values.append(node)
                elif node.op == "load":
                    sweep.loads.add(node.attr)
                continue
            sweep.nodes.append(node)
            if node.op == "load":
                sweep.feasible &= node.attr not in gone
                sweep.loads.add(node.attr)
            stack.extend(reversed(node.args))
        return sweep

    def choose(self) -> tuple[list[_Sweep], dict[str, int]]:
        """The sweeps with the least traffic, and the level at which each owner's stores stand."""
        groups = self.groups()
        first = {id(g): max(self.level(s.node) for o in g for s in self.stores[o]) for g in groups}
        first = {g: level + level % 2 for g, level in first.items()}  # of sweeps, which can store these values
        last = max([*first.values(), *self._before()], default=0)
        best: tuple[tuple[float, int, int], list[_Sweep], dict[str, int]] | None = None
        for levels in itertools.product(*(range(first[id(g)], last + 1, 2) for g in groups)):
            at = {o: level for g, level in zip(groups, levels, strict=True) for o in g}
            sweeps = self.sweeps(at)
            if not all(s.feasible for s in sweeps):
                continue
            moved = sum(self.size[b] for s in sweeps for b in s.loads) + sum(2.0 * len(s.calls) for s in sweeps)
            moved += sum(self.size[s.buffer] for ss in self.stores.values() for s in ss)
            early = sum(at[o] < s.level and self._reads_new(s, o) for s in sweeps for o in at)
            key = round(moved, 6), early, -sum(levels) if early else sum(levels)
            if best is None or key < best[0]:
                best = key, sweeps, at
        assert best is not None
        return best[1], best[2]

    def _reads_new(self, sweep: _Sweep, owner: str) -> bool:
        return owner in self.kept and any(n.uid == self.kept[owner].new.uid for n in sweep.nodes)

    # -- programs

    def piece(self, sweep: _Sweep, at: Mapping[str, int], small: SmallWork, number: int, count: int) -> StageProgram:
        """The sweep's own program."""
        early = {self.kept[o].new: self.kept[o].old for o in at if at[o] < sweep.level and o in self.kept}
        mapped = Rewriter(lambda node: node)
        memo = mapped.memo
        memo |= {value: small.read(value) for value in sweep.values}
        memo |= {x: self.read_call(x) for x in (*self.calls, *self.results) if x.uid in sweep.calls} | early
        stores, reduced = [], []
        for r in self.reductions:
            if self.level(r) == sweep.level + 1:
                name = small.name(r)
                reduced.append(Buffer(name, dtypes.f32, r.space, "partial", name, False, True, r.op))
                stores.append(Store(name, mapped(r.args[0])))
        for c in self.calls:
            if self.level(c) == sweep.level + 1:
                name = self.names[c.uid]
                reduced.append(Buffer(name, dtypes.bf16, spaces.elem, "temp", name, False, True))
                stores.append(Store(name, as_bf16(mapped(c.args[0]))))
        for x in self.operands:
            if self.level(x) == sweep.level:
                reduced.append(self._temp(x))
                stores.append(Store(self.names[x.uid], mapped(x)))
        stores += [Store(s.buffer, mapped(s.node)) for o, ss in self.stores.items() if at[o] == sweep.level for s in ss]

        def new(let: Let) -> Node | None:
            return None if let.node in early else memo.get(let.node)

        why = self._why(sweep, reduced, number, count)
        return StageProgram(self._program(stores, new, reduced, spaces.elem), sweep.level, why)

    def read_call(self, node: Node) -> Node:
        """Return the load by which a later stage reads a value of functions of whole matrices."""
        if node not in self.calls:
            return read_back(self.names[node.uid], node)
        return ir.op("cast", ir.load(self.names[node.uid], dtypes.bf16, spaces.elem), attr=dtypes.f32)

    def call_pieces(self) -> list[StageProgram]:
        """A stage for every call: a program whose one store is the call, in place."""
        out = []
        for c in self.calls:
            name = self.names[c.uid]
            call = ir.op("call", self.read_call(c), *c.args[1:], attr=c.attr)
            buffer = Buffer(name, dtypes.bf16, spaces.elem, "temp", name)
            stored = Store(name, ir.op("cast", call, attr=dtypes.bf16))
            lets = tuple(let for let in self.program.body if let.node.space == spaces.host)
            program = replace(
                self.program, buffers=(buffer,), body=lets, stores=(stored,), kept=(), host_stores=(),
                space=spaces.elem, sums=(),
            )  # fmt: skip
            out.append(StageProgram(program, self.level(c), f"{c.attr} of whole matrices"))
        return out

    def _temp(self, node: Node) -> Buffer:
        """Return the buffer of a value that is left for functions of whole matrices, or that they leave."""
        return Buffer(self.names[node.uid], dtypes.f32, node.space, "temp", self.names[node.uid], False, True)

    def matrix_pieces(self, small: SmallWork) -> list[StageProgram]:
        """A stage for every level that has functions of whole matrices; matrix states are stored in the last one."""
        levels = {self.level(x) for x in self.results}
        if self.matrix_stores:
            levels.add(max([*levels, *(self.level(s.node) for s in self.matrix_stores)]))
        out = []
        for level in sorted(levels):
            memo: dict[Node, Node] = {x: ir.load(self.names[x.uid], dtypes.f32, spaces.elem) for x in self.operands}
            memo |= {x: small.read(x) for x in self.given}
            memo |= {x: self.read_call(x) for x in self.results if self.level(x) < level}
            mapped = Rewriter(lambda node: node)
            mapped.memo |= memo
            made = [x for x in self.results if self.level(x) == level]
            temps = [self._temp(x) for x in made]
            stores = [Store(self.names[x.uid], as_number(mapped(x))) for x in made]
            if level == max(levels):
                stores += [Store(s.buffer, mapped(s.node)) for s in self.matrix_stores]

            def new(let: Let, mapped: Rewriter = mapped) -> Node | None:
                return mapped(let.node) if let.node.uid in self.matrices else None

            program = self._program(stores, new, temps, spaces.whole)
            out.append(StageProgram(program, level, "functions of whole matrices"))
        return out

    def _program(
        self, stores: list[Store], new: Callable[[Let], Node | None], temps: list[Buffer], space: Space
    ) -> Program:
        """A program over these stores, with the buffers that it touches.

        new  let -> what its value became, None where it is not computed here
        """
        read, written = set(loads(s.node for s in stores)), {s.buffer for s in stores}
        nodes = list(postorder(s.node for s in stores))
        seen, lets = {n.uid for n in nodes}, []
        for let in self.program.body:
            if let.node.space == spaces.host:
                lets.append(let)
            elif (node := new(let)) is not None and node.uid in seen and node.op != "load":
                lets.append(replace(let, node=node))
        found = []
        for b in (*self.program.buffers, *temps):
            # Every sweep walks along the parameter: its pointer comes first whether it is read or not.
            if b.name in read | written:
                found.append(replace(b, reads=b.name in read, writes=b.name in written))
        known = {b.name for b in found}
        for n in nodes:
            if n.op == "load" and n.attr not in known:
                known.add(n.attr)
                found.append(Buffer(n.attr, n.dtype, n.space, "temp", n.attr, True, False))
        return replace(
            self.program, buffers=tuple(found), body=tuple(lets), stores=tuple(stores), space=space, kept=(),
            host_stores=(), sums=(),
        )  # fmt: skip

    def _why(self, sweep: _Sweep, reduced: list[Buffer], number: int, count: int) -> str:
        if not reduced:
            return "the update" if number == count else "stores"
        users = []
        for r in self.crossing:
            if self.level(r) == sweep.level + 1:
                let = self.first_users.get(r.uid)
                made = str(r.attr) if r.op == "call" else r.op
                users.append(f"{let.name} ({let.loc.short})" if let and let.loc else made)
        return ", ".join(dict.fromkeys(users))


class SmallWork:
    """The work between sweeps: which small values exist when, and in which order they are made.

    A round runs over one space.  Within a level, a value of another space, or a reduction of the same one, belongs to
    a later round.
    """

    def __init__(self, cutter: Cutter, sweeps: list[_Sweep]) -> None:
        self.cutter = cutter
        program, level = cutter.program, cutter.level
        self.stores = [s for s in program.stores if cutter._is_small_store(s)]
        self.levels: dict[int, int] = {}  # node uid -> the level at which it is made
        self.state: dict[int, str] = {}  # node uid -> the state buffer that holds it from its round on
        first = min((s.level + 1 for s in sweeps), default=START)
        wanted: list[tuple[Node, int]] = [(v, self._due(v)) for s in sweeps for v in s.values]
        wanted += [(s.node, max(level(s.node), first)) for s in self.stores if s.node.args]
        wanted += [(n, self._due(n)) for n in (*cutter.given, *reversed(program.sums))]
        self.roots: dict[int, list[Node]] = {}
        stack = wanted
        seen: set[tuple[int, int]] = set()
        while stack:
            node, at = stack.pop()
            if (node.uid, at) in seen:
                continue
            seen.add((node.uid, at))
            self.roots.setdefault(at, []).append(node)
            for n in self._inside(node, at):
                for a in n.args:
                    if is_small(a) and a.args and (START < level(a) < at or a.op == "model_sum"):
                        stack.append((a, self._due(a)))
        self.rounds: dict[Round, list[Node]] = {}
        self.home: dict[int, Round] = {}  # node uid -> the first round that makes it
        self.temps: set[int] = set()  # uids of values that later rounds read
        for at in sorted(self.roots):
            self._arrange(at)
        self.commits: dict[Round, list[Store]] = {}
        self._commit(sweeps)

    def _due(self, node: Node) -> int:
        """The level that makes a value; a sum over the model is begun a level before it is there."""
        return self.cutter.level(node) - (2 if node.op == "model_sum" else 0)

    def _inside(self, root: Node, at: int) -> list[Node]:
        """The small operations below root that are done at that level, operands first."""
        level = self.cutter.level
        out: list[Node] = []
        seen: set[int] = set()
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                out.append(node)
                continue
            if node.uid in seen or not is_small(node) or not node.args or reduces_elements(node):
                continue
            if node is not root and (START < level(node) < at or node.op == "model_sum"):
                continue
            seen.add(node.uid)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
        return out

    def _arrange(self, at: int) -> None:
        """Divide the work of one level into rounds."""
        depth: dict[int, int] = {}
        nodes: dict[int, Node] = {}
        for root in self.roots[at]:
            for n in self._inside(root, at):
                nodes.setdefault(n.uid, n)
        for n in list(postorder(self.roots[at])):
            if n.uid not in nodes:
                continue
            d = 0
            for a in n.args:
                if a.uid in nodes:
                    d = max(d, depth[a.uid] + (a.space != n.space and a.op not in REDUCTIONS))
            depth[n.uid] = d + 1 if n.op in REDUCTIONS else d
        summed = {n.args[0].uid for n in nodes.values() if n.op == "model_sum"}  # over the model, in one round
        depth |= dict.fromkeys(summed, max((depth.get(x, 0) for x in summed), default=0))
        for uid, n in nodes.items():
            made = n.args[0] if n.op in REDUCTIONS else n
            key = at, depth.get(made.uid, 0), _ORDER[made.space.name]
            self.rounds.setdefault(key, []).append(n)
            self.home.setdefault(uid, key)
        for uid, n in nodes.items():
            for a in n.args:
                # A value of another round is read from memory; a reduction always is.
                mine = self.home[uid] if n.op in REDUCTIONS else (at, depth[uid], _ORDER[n.space.name])
                if a.uid in nodes and (a.op in REDUCTIONS or self.home[a.uid] != mine):
                    self.temps.add(a.uid)
        self.temps.update(root.uid for root in self.roots[at])

    def _commit(self, sweeps: list[_Sweep]) -> None:
        """Small states are stored when nothing reads their old value any more."""
        level = self.cutter.level
        floors: dict[str, Round] = {}
        keys: dict[str, Round] = {}
        order = {s.buffer: _ORDER[self.cutter.buffers[s.buffer].space.name] for s in self.stores}
        for s in self.stores:
            space = order[s.buffer]
            floor = self.home.get(s.node.uid) or (min(x.level for x in sweeps) + 1, 0, space)
            for sweep in sweeps:
                if s.buffer in sweep.loads:
                    floor = max(floor, (sweep.level + 1, 0, space))
            whole = self.cutter.matrices.values()
            if any(a.op == "load" and a.attr == s.buffer for n in whole for a in n.args):
                floor = max(floor, (max(map(level, whole)) + 2, 0, space))
            for key, nodes in self.rounds.items():
                if any(a.op == "load" and a.attr == s.buffer for n in nodes for a in n.args):
                    floor = max(floor, key if key[2] == space else (key[0], key[1] + 1, space))
            floors[s.buffer] = floor
        changed = True
        while changed:
            changed = False
            for s in self.stores:
                for other in self.stores:  # a store that hands on this one's old value
                    handed = other.node.op == "load" and other.node.attr == s.buffer
                    if handed and other is not s and other.buffer in keys:
                        floors[s.buffer] = max(floors[s.buffer], keys[other.buffer])
                floor = floors[s.buffer]
                fitting = [k for k in self.rounds if k[2] == order[s.buffer] and k >= floor]
                key = min(fitting, default=(floor[0], floor[1], order[s.buffer]))
                if keys.get(s.buffer) != key:
                    keys[s.buffer], changed = key, True
        for s in self.stores:
            made, key = self.home.get(s.node.uid), keys[s.buffer]
            self.commits.setdefault(key, []).append(s)
            if made is not None and key == made and s.node.dtype is dtypes.f32:
                self.state[s.node.uid] = s.buffer

    def name(self, node: Node) -> str:
        """The buffer in which later stages find a value."""
        return self.state.get(node.uid) or self.cutter.names[node.uid]

    def read(self, node: Node) -> Node:
        """Return what a later stage reads for a value."""
        return read_back(self.name(node), node)

    def pieces(self) -> list[StageProgram]:
        """A program for every round."""
        found = map(self._round, sorted({*self.rounds, *self.commits}))
        return [piece for piece in found if piece is not None]

    def _round(self, key: Round) -> StageProgram | None:
        at, space = key[0], list(_OF)[key[2]]
        cutter = self.cutter
        here = {n.uid for n in self.rounds.get(key, ()) if n.op not in REDUCTIONS}
        memo: dict[int, Node] = {}

        def mapped(node: Node) -> Node:
            if node.uid not in memo:
                if node.uid in here or node.space == spaces.host or not node.args:
                    new = ir.rebuild(node, [mapped(a) for a in node.args]) if node.args else node
                else:
                    new = self.read(node)
                memo[node.uid] = new
            return memo[node.uid]

        stores, temps = [], []
        for n in self.rounds.get(key, ()):
            if n.op in REDUCTIONS:
                temps.append(Buffer(self.name(n), dtypes.f32, n.space, "partial", self.name(n), False, True, n.op))
                stores.append(Store(self.name(n), mapped(n.args[0])))
            elif n.uid in self.temps and n.uid not in self.state and self.home[n.uid] == key:
                temps.append(Buffer(self.name(n), dtypes.f32, n.space, "temp", self.name(n), False, True))
                stores.append(Store(self.name(n), as_number(mapped(n))))
        stores += [Store(s.buffer, mapped(s.node)) for s in self.commits.get(key, ())]
        if not stores:
            return None
        made = cutter._program(stores, lambda let: memo.get(let.node.uid), temps, Space(space))
        return StageProgram(made, at, f"values of {_OF[space]}")


def cut(program: Program) -> Cut:
    """See the module's docstring."""
    if not needs_cutting(program):
        return Cut((StageProgram(replace(program, kept=()), 0, "the update"),))
    cutter = Cutter(by_rows(program))
    sweeps, at = cutter.choose()
    small = SmallWork(cutter, sweeps)
    pieces = [cutter.piece(s, at, small, k + 1, len(sweeps)) for k, s in enumerate(sweeps)]
    pieces += small.pieces()
    pieces += cutter.call_pieces() + cutter.matrix_pieces(small)
    early = tuple(o for o in at if any(at[o] < s.level and cutter._reads_new(s, o) for s in sweeps))
    few = any(b.space.name in spaces.SMALL for b in program.buffers)
    if len(pieces) == 1 and not few and not pieces[0].program.is_sized:  # one kernel, whose table has every buffer
        (only,) = pieces
        own = {b.name: b for b in only.program.buffers}
        buffers = tuple(own.get(b.name, replace(b, reads=False, writes=False)) for b in program.buffers)
        pieces = [replace(only, program=replace(only.program, buffers=buffers))]
    return Cut(tuple(sorted(pieces, key=lambda p: p.level)), early)
