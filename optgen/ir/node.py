"""The one node type, and the grammar of what it can say.

    program = buffer* host-let* let* store*
    expr    = const value                       a number; space host
            | sym name                          a host scalar by name (hyper-parameter, `step`, hoisted let)
            | load buffer                       what the buffer holds, in its storage dtype
            | extent name                       `rows`, `columns` or `elements` of the tensor, as f32; space tensor
            | draw (kind, bits, width, value)   random bits of a codec, i32: the methods of formats.format.Noise
            | PRIM expr*                        one row of ops/prims.py
            | cast expr dtype | bitcast expr dtype
            | block_max expr size | block_min expr size
            | lookup expr table | search expr table
            | call expr scalar* name                 a function of whole matrices, one value per element
            | row_sum expr | col_sum expr | mat_sum expr | tensor_sum expr | row_max ...

Nodes are immutable and hash-consed: equal means identical, so `is` compares and dicts are cheap.  Where a
node came from is not part of it: names and source places belong to the lets of a program.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import lru_cache
from typing import Any

from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType
from optgen.ops.prims import PRIMS
from optgen.ops.spaces import Space


class Node:
    """op, operands, attribute (constant, name, dtype or block size), dtype and space."""

    __slots__ = ("__weakref__", "args", "attr", "dtype", "op", "space", "uid")

    op: str
    args: tuple[Node, ...]
    attr: Any
    dtype: DType
    space: Space
    uid: int

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("nodes are immutable")

    def __reduce__(self) -> Any:
        return (_make, (self.op, self.args, self.attr, self.dtype, self.space))

    def __repr__(self) -> str:
        return brief(self)


_table: dict[tuple[Any, ...], Node] = {}


def _make(op: str, args: tuple[Node, ...], attr: Any, dtype: DType, space: Space) -> Node:
    # repr() tells 0.0 from -0.0 and 1 from 1.0, which == does not.  Nodes hash and compare by identity.
    key = (op, args, attr if attr is None else repr(attr), dtype.name, space)
    node = _table.get(key)
    if node is None:
        node = object.__new__(Node)
        put = object.__setattr__
        put(node, "op", op)
        put(node, "args", args)
        put(node, "attr", attr)
        put(node, "dtype", dtype)
        put(node, "space", space)
        put(node, "uid", len(_table))
        _table[key] = node
    return node


# -- as text (the whole form: show.py)


def leaf(node: Node) -> str:
    """Return a node without operands as text."""
    if node.op == "const":
        if node.dtype is dtypes.f32:
            return repr(node.attr)
        return str(node.attr).lower() if node.dtype is dtypes.boolean else f"{node.attr}i"
    if node.op == "sym":
        return f"${node.attr}"
    if node.op == "load":
        return f"%{node.attr}:{node.dtype}" + (f"/{node.space.size}" if node.space.size else "")
    return f"#{node.op}.{node.attr}"


def brief(node: Node, depth: int = 5) -> str:
    """One node as text, `...` for what is further down: as a tree, a shared graph has more nodes than memory."""
    if not node.args:
        return leaf(node)
    return written(node, [brief(a, depth - 1) for a in node.args]) if depth else "..."


def written(node: Node, args: list[str]) -> str:
    """Return a node as text, its operands being given as text."""
    attr = f"<{node.attr}>" if node.attr is not None else ""
    return f"{node.op}{attr}({', '.join(args)})"


# -- leaves


def const(value: float | int | bool, dtype: DType = dtypes.f32) -> Node:
    if dtype is dtypes.f32:
        value = float(value)
    return _make("const", (), value, dtype, spaces.host)


def sym(name: str, dtype: DType = dtypes.f32) -> Node:
    """A host scalar: fp64 on the host; rounded once to f32 where a kernel reads it."""
    return _make("sym", (), name, dtype, spaces.host)


def load(buffer: str, dtype: DType, space: Space) -> Node:
    return _make("load", (), buffer, dtype, space)


def extent(name: str) -> Node:
    """The number of `rows` or `columns` of the matrix of the last two dimensions, or of `elements` of the tensor; or
    the key of its `stream` of random numbers."""
    return _make("extent", (), name, dtypes.f32, spaces.tensor)


def draw(kind: str, bits: int, width: int) -> Node:
    """Random bits that a codec takes from its share of a word: `integer`, `fraction` or `middle`, `width` bits wide."""
    return _make("draw", (), (kind, bits, width), dtypes.i32, spaces.elem)


# -- everything else


def op(name: str, *args: Node, attr: Any = None) -> Node:
    """The node `name(args)`, typed: dtype by the primitive's row, space by joining the operands'."""
    row = PRIMS[name]
    if len(args) != row.arity and row.arity >= 0:
        raise ValueError(f"{name} takes {row.arity} operands, got {len(args)}")
    dtype: Any = attr if row.dtype == "attr" else row.dtype or args[-1].dtype
    if not row.space:
        space = spaces.join_all([a.space for a in args])
    else:
        space_of = _SPACES.get(row.space)
        space = space_of(args, attr) if space_of else Space(row.space)
    return _make(name, args, attr, dtype, space)


_SPACES: dict[str, Callable[[tuple[Node, ...], Any], Space]] = {
    "block": lambda args, attr: spaces.block(attr),
    "first": lambda args, attr: args[0].space,
    "product": lambda args, attr: spaces.of_dims(spaces.dims(args[0].space)[0], spaces.dims(args[1].space)[1]),
    "transposed": lambda args, attr: spaces.of_dims(*reversed(spaces.dims(args[0].space))),
}


def rebuild(node: Node, args: Iterable[Node]) -> Node:
    """The same operation on other operands, retyped."""
    new = tuple(args)
    if new == node.args:  # nodes are equal where they are the same
        return node
    return op(node.op, *new, attr=node.attr)


# -- traversal


def postorder(roots: Iterable[Node]) -> tuple[Node, ...]:
    """Every node below the roots once, operands before users, in a deterministic order."""
    return _postorder(tuple(roots))


@lru_cache(maxsize=256)  # a stage and the checks after it look at the same roots several times
def _postorder(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    seen: set[Node] = set()
    return tuple(node for root in roots for node in unseen(root, seen))


def unseen(root: Node, seen: set[Node]) -> list[Node]:
    """The nodes below a root that are not in `seen`, in the order of `postorder`; afterwards they are.

    `seen` holds with a node everything below it.
    """
    out = []
    for node in waiting(root, seen):
        seen.add(node)
        out.append(node)
    return out


def waiting(root: Node, done: Container[Node]) -> Iterator[Node]:
    """Yield the nodes below a root that are not `done`, operands first; the caller puts each there before the next."""
    if root in done:
        return
    stack: list[Node | None] = [root]
    path: list[Node] = []  # whose operands are being looked at; None on the stack ends the last one's
    while stack:
        node = stack.pop()
        if node is None:
            node = path.pop()
        elif node in done:
            continue
        elif node.args:
            waiting = [a for a in node.args if a not in done]
            if waiting:
                path.append(node)
                stack.append(None)
                waiting.reverse()
                stack += waiting
                continue
        yield node


class Rewriter:
    """A rewriting by `rule(node) -> node`, bottom-up with a memo; `rule` sees a node whose operands are done."""

    def __init__(self, rule: Callable[[Node], Node]) -> None:
        self.rule = rule
        self.memo: dict[Node, Node] = {}

    def __call__(self, root: Node) -> Node:
        memo, rule = self.memo, self.rule
        for node in waiting(root, memo):
            args = tuple([memo[a] for a in node.args])
            memo[node] = rule(node if args == node.args else op(node.op, *args, attr=node.attr))
        return memo[root]


def is_const(node: Node, value: float | None = None) -> bool:
    return node.op == "const" and (value is None or node.attr == value)


def loads(roots: Iterable[Node]) -> list[str]:
    return [n.attr for n in postorder(roots) if n.op == "load"]
