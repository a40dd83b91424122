"""The invariants of a Program and a Schedule after every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from optgen.ir.node import Node, postorder
from optgen.ir.program import Program, Schedule
from optgen.ops import dtypes, spaces
from optgen.ops.prims import CALLS, PRIMS

COMPUTE = (dtypes.f32, dtypes.i32, dtypes.boolean)


class BrokenIR(Exception):
    """A stage made something that the next one cannot read: a fault of the compiler, not of the user."""


_KINDS: dict[str, tuple[Callable[[Node], bool], str]] = {
    "f": (lambda x: x.dtype is dtypes.f32, "f32"),
    "i": (lambda x: x.dtype is dtypes.i32, "i32"),
    "b": (lambda x: x.dtype is dtypes.boolean, "a condition"),
    "k": (lambda x: x.dtype is dtypes.i32 and x.op == "const", "an i32 constant"),
    "c": (lambda x: x.dtype in (dtypes.boolean, dtypes.i32), "a condition or an i32"),
    "h": (lambda x: x.space == spaces.host, "in host space"),
}


def _operands(node: Node) -> Iterator[str]:
    """Yield where operands are not those that the primitive's row takes."""
    row = PRIMS.get(node.op)
    if row is None:
        return
    for x, letter in zip(node.args, row.takes, strict=False):
        if letter in _KINDS and not _KINDS[letter][0](x):
            yield f"{node.op} takes {_KINDS[letter][1]}, got {x.dtype} in {x.space}"
    alike = {x.dtype for x, letter in zip(node.args, row.takes, strict=False) if letter in "nx"}
    if len(alike) > 1:
        yield f"{node.op} of different dtypes {alike}"
    if node.op == "bitcast" and node.args[0].dtype.bits != node.dtype.bits:
        yield f"bitcast {node.args[0].dtype} -> {node.dtype}"
    if node.op == "call" and any(a.space != spaces.host and a.op != "extent" for a in node.args[CALLS[node.attr] :]):
        yield f"{node.attr} of more than {CALLS[node.attr]} matrices: the other operands are host scalars"


def _arithmetic(node: Node) -> Iterator[str]:
    narrow = [a.dtype for a in node.args if a.dtype not in COMPUTE and a.dtype is not dtypes.f64]
    if narrow and node.op not in ("cast", "bitcast"):
        yield f"{node.op} computes in storage dtype {narrow[0]}"


_sound: set[Node] = set()  # nodes that passed: a node never changes, and most outlive many passes


@lru_cache(maxsize=256)  # most stages leave the nodes of some programs as they are
def _looked_at(roots: tuple[Node, ...]) -> tuple[tuple[str, ...], tuple[Node, ...]]:
    """Return the faults of the nodes below the roots, and the loads among them."""
    order = postorder(roots)
    faults = []
    if not _sound.issuperset(order):
        nodes = [node for node in order if node not in _sound]
        faults = [f for node in nodes for f in (*_operands(node), *_arithmetic(node))]
        if not faults:
            _sound.update(nodes)
    return tuple(faults), tuple([node for node in order if node.op == "load"])


def _loads(p: Program) -> Iterator[str]:
    known = {b.name: b for b in p.buffers}
    for node in _looked_at(tuple(p.roots()))[1]:
        if node.attr not in known or known[node.attr].dtype != node.dtype:
            yield f"load of {node.attr} as {node.dtype}"


def _stores(p: Program) -> Iterator[str]:
    known = {b.name: b for b in p.buffers}
    seen = set()
    for s in p.stores:
        if s.buffer not in known or s.node.dtype != known[s.buffer].dtype:
            yield f"store of {s.node.dtype} to {s.buffer}"
        if s.buffer in seen:
            yield f"two stores to {s.buffer}"
        seen.add(s.buffer)


def _host(p: Program) -> Iterator[str]:
    known = set(p.hypers)
    for let in p.host:
        if let.node.space != spaces.host:
            yield f"host let {let.name} lives in {let.node.space}"
        for node in postorder([let.node]):
            if node.op == "sym" and node.attr not in known:
                yield f"host let {let.name} reads unknown {node.attr}"
        known.add(let.name)


def verify(ir: Program | Schedule, *, after: str) -> None:
    """Raise BrokenIR naming the stage and everything that does not hold."""
    program = ir.program if isinstance(ir, Schedule) else ir
    faults = [*_looked_at(tuple(program.roots()))[0], *_loads(program), *_stores(program), *_host(program)]
    if faults:
        raise BrokenIR(f"after {after}: " + "; ".join(faults[:8]))
