"""Lowers a rule alone: a program over fp32 values, whose states meet their formats in runtime/records/join."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from optgen.formats.format import Field
from optgen.formats.plan import Storage
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import GRAD_SCALE, Buffer, Let, Program, Role, StateValue, Store
from optgen.ir.ranges import ANY, Intervals
from optgen.lang.spec import MatrixKind, Spec
from optgen.lang.values import Value
from optgen.lower.naming import Recorder
from optgen.ops import dtypes, spaces
from optgen.ops.spaces import Space
from optgen.runtime.records.join import settled


def buffer_of(name: str, field: Field, role: Role, owner: str, space: Space = spaces.elem) -> Buffer:
    """Return the buffer of a field of a value that has one entry for each of a space."""
    if field.space != "elem":
        space = Space(field.space)
    elif field.per > 1:
        space = spaces.block(field.per)
    return Buffer(name, field.dtype, space, role, owner)


def read(buffer: Buffer, record: Recorder | None = None) -> Value:
    return Value(ir.load(buffer.name, buffer.dtype, buffer.space), record)


def untouched(spec: Spec, storage: Storage, flags: Mapping[str, bool]) -> frozenset[str]:
    """The states that a step under these flags leaves as they are kept, neither decoded nor encoded again.

    The rule gives them back.  A state that is kept relative to another one stays only where that one does, and that one
    only where all do that are kept relative to it: they are divided by its root, which is read back above 0 once it is
    encoded, not as it began.
    """
    return frozenset(settled(spec.unchanged(flags), relative(spec, storage)))


def relative(spec: Spec, storage: Storage) -> dict[str, str]:
    """Return state -> the one that it is stored relative to."""
    bases = {s.name: s.normalized_by for s in spec.states}
    found = ((name, bases[name]) for name, fmt in storage.states.items() if fmt.relative)
    return {name: base for name, base in found if base is not None and base in storage.states}


def differing(spec: Spec, flags: Mapping[str, bool]) -> frozenset[str]:
    """Return the states (and "p") that some steps make in another way: multiples of a hyper-parameter, or the others.

    Of what a step resets, or takes from elsewhere, the noise of the steps between two such ones is all that counts.
    """
    made = [{"p": trace.p, **trace.states} for trace in map(spec.trace, spec.at_steps(flags))]
    return frozenset(name for new in made for name, node in new.items() if node is not made[0].get(name))


PACK = 64  # columns that packed codes are walked in where nothing else is in blocks


def block_of(buffers: tuple[Buffer, ...]) -> int:
    least = PACK if any(b.dtype.packed for b in buffers) else 1
    return max((b.space.size for b in buffers), default=0) or least


def needs_matrix(spec: Spec, flags: Mapping[str, bool]) -> bool:
    """Return True if the rule itself works on rows and columns, at this or another step: it has no vectors then.

    What is kept by row is kept by the same rows at all steps.
    """
    traces = [spec.trace(setting) for setting in spec.at_steps(flags)]
    nodes = ir.postorder([node for trace in traces for node in (trace.p, *trace.states.values())])
    return any(n.space.name in ("row", "col", "mat") or n.op == "call" for n in nodes)


def matrix_of(spec: Spec, flags: Mapping[str, bool], storage: Storage) -> MatrixKind:
    """Return the matrix that rows and columns belong to: the rule's, or if it has none, that of the formats."""
    if storage.matrix is None or needs_matrix(spec, flags):
        return spec.matrix
    return storage.matrix


def _signed(spec: Spec) -> Callable[[Node], Node]:
    """One node of the rule, cbrt and power spelled for negative operands too where those are not ruled out.

    States that are nonneg, squares, magnitudes and the hyper-parameters' ranges rule them out.
    """
    intervals = Intervals(dict(hyper_ranges(spec)))
    nonneg = {s.name for s in spec.states if s.nonneg}

    def rule(node: Node) -> Node:
        if node.op == "load":
            intervals.known[node] = (0.0, math.inf) if node.attr in nonneg else ANY
        if node.op in ("cbrt", "power") and node.space != spaces.host and intervals(node.args[0])[0] < 0:
            return ir.op(f"{node.op}_signed", *node.args)
        if node.op == "rint" and node.space != spaces.host:
            return ir.op("add", node, ir.const(0.0))  # machines differ in the sign of a zero that was negative
        return node

    return rule


def hyper_ranges(spec: Spec) -> tuple[tuple[str, tuple[float, float]], ...]:
    """Closed intervals of the hyper-parameters and the step."""
    return (("step", (1.0, math.inf)), *((part, h.interval) for h in spec.hypers for part in h.parts))


def lower_rule(spec: Spec, flags: Mapping[str, bool]) -> Program:
    """One step of the rule alone: weight, gradient and states are fp32, whatever a plan makes of them.

    States that a plan may store relative to one another are stored in one sweep, and both where one of them changes.
    """
    trace, present = spec.trace(dict(flags)), spec.present(flags)
    held = {s.name: s.space for s in present}
    g = ir.op("mul", ir.sym(GRAD_SCALE), ir.load("g", dtypes.f32, spaces.elem))
    signed, scaled = Rewriter(_signed(spec)), Rewriter(lambda n: g if n.op == "load" and n.attr == "g" else n)

    def rewrite(node: Node) -> Node:
        return scaled(signed(node))

    lets = [replace(let, node=rewrite(let.node)) for let in trace.lets]
    new = {"p": rewrite(trace.p), **{name: rewrite(node) for name, node in trace.states.items()}}
    together = tuple((s.name, s.normalized_by) for s in present if s.normalized_by in held)
    still = frozenset(settled(spec.unchanged(flags), dict(together)))
    body = [Let("g", g, "decode"), *lets]
    stores = tuple(Store(name, new[name]) for name in ("p", *held) if name not in still)
    elements = [name for name, space in held.items() if space == spaces.elem and name not in still]
    hosts = spec.present_host(flags)
    return Program(
        name=spec.name,
        buffers=_buffers(held, still, body, stores),
        host=(),
        body=tuple(let for let in body if let.node.space is not spaces.host or let.stage == "update"),
        stores=stores,
        hypers=(*(part for h in spec.hypers for part in h.parts), GRAD_SCALE, "step", *(h.name for h in hosts)),
        ranges=hyper_ranges(spec),
        host_states=tuple((h.name, h.init) for h in hosts),
        host_stores=tuple(Let(name, node) for name, node in trace.host_states.items()),
        kept=tuple(StateValue(x, ir.load(x, dtypes.f32, spaces.elem), new[x]) for x in ("p", *elements)),
        sums=tuple(dict.fromkeys(rewrite(node) for node, *_ in trace.sums)),
        together=together,
    )


def _buffers(
    held: Mapping[str, Space], still: Collection[str], body: list[Let], stores: tuple[Store, ...]
) -> tuple[Buffer, ...]:
    """Return the buffers of a rule; states that stay as they are kept are read by what is stored alone."""
    needed = [s.node for s in stores]
    live, used = set(ir.loads(needed)), set(ir.loads([*(let.node for let in body), *needed]))
    buffers = [Buffer("p", dtypes.f32, spaces.elem, "param", "p")]
    buffers += [Buffer("g", dtypes.f32, spaces.elem, "grad", "g", writes=False)]
    buffers += [Buffer(name, dtypes.f32, space, "state", name) for name, space in held.items()]
    reads = {b.name: b.name in live if b.owner in still else b.name in used for b in buffers}
    return tuple(replace(b, reads=reads[b.name], writes=b.writes and b.owner not in still) for b in buffers)
