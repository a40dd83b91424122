"""Joins what a spec computes with how a plan stores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from optgen.formats import floats
from optgen.formats.format import Field
from optgen.formats.masters import Native
from optgen.formats.plan import Plan, Storage, field_names
from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import GRAD_SCALE, Buffer, KeptValue, Let, Program, Role, Store
from optgen.ir.ranges import ANY, Intervals, is_plus
from optgen.lang.spec import MatrixKind, Spec
from optgen.lang.values import Value, cast
from optgen.lower.naming import Recorder
from optgen.lower.noise import deal
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


def weight_buffers(storage: Storage) -> dict[str, Buffer]:
    """Suffix -> buffer of the weight: the parameter itself under "", extras as weight_<suffix>."""
    extras = storage.master.fields(storage.param).items()
    return {k: buffer_of(f"weight_{k}", f, "weight", "p") if k else buffer_of("p", f, "param", "p") for k, f in extras}


def state_buffers(spec: Spec, storage: Storage, state: str) -> dict[str, Buffer]:
    """Suffix -> buffer of one state, in the state's own space."""
    own = next(d.space for d in spec.states if d.name == state)
    fields = storage.states[state].fields()
    return {k: buffer_of(key, fields[k], "state", state, own) for k, key in field_names(state, fields).items()}


def read(buffer: Buffer, record: Recorder | None = None) -> Value:
    return Value(ir.load(buffer.name, buffer.dtype, buffer.space), record)


def encoding_order(spec: Spec, storage: Storage) -> list[str]:
    """Return the states, those that others are stored relative to first."""
    base = {d.normalized_by for d in spec.states if d.name in storage.states and storage.states[d.name].relative}
    return sorted(storage.states, key=lambda s: (s not in base, list(storage.states).index(s)))


def normalizer(spec: Spec, state: str) -> str | None:
    return next(d.normalized_by for d in spec.states if d.name == state)


def _decode_all(spec: Spec, storage: Storage) -> tuple[Value, dict[str, Value], list[Let]]:
    """The decoded weight and states, and a let for each that is more than a load."""
    record = Recorder("p", "decode")
    weight = storage.master.decode({k: read(b, record) for k, b in weight_buffers(storage).items()}, storage.param)
    inner = record.lets()
    states: dict[str, Value] = {}
    for name in encoding_order(spec, storage):
        fmt = storage.states[name]
        record = Recorder(name, "decode")
        parts = {k: read(b, record) for k, b in state_buffers(spec, storage, name).items()}
        root = None
        if fmt.relative:
            base = normalizer(spec, name)
            assert base is not None
            root = storage.states[base].decode_root({k: read(b) for k, b in state_buffers(spec, storage, base).items()})
        states[name] = fmt.decode(parts, root=root)
        inner += record.lets()
    lets = [Let("p", weight.node, "decode")]
    lets += [Let(name, v.node, "decode") for name, v in states.items()]
    return weight, states, [let for let in inner + lets if let.node.op != "load"]


def untouched(spec: Spec, storage: Storage, flags: Mapping[str, bool]) -> frozenset[str]:
    """The states that a step under these flags leaves as they are kept, neither decoded nor encoded again.

    The rule gives them back.  A state that is kept relative to another one stays only where that one does, and that one
    only where all do that are kept relative to it: they are divided by its root, which is read back above 0 once it is
    encoded, not as it began.
    """
    return frozenset(settled(spec.unchanged(flags), dict(_pairs(spec, storage, alone=False))))


def _pairs(spec: Spec, storage: Storage, alone: bool) -> tuple[tuple[str, str], ...]:
    """Return pairs of a state and the one that it is stored relative to; `alone`: those that a plan may store so."""
    found = ((name, normalizer(spec, name)) for name, fmt in storage.states.items() if alone or fmt.relative)
    return tuple((name, base) for name, base in found if base is not None and base in storage.states)


def differing(spec: Spec, flags: Mapping[str, bool]) -> frozenset[str]:
    """Return the states (and "p") that some steps make in another way: multiples of a hyper-parameter, or the others.

    Of what a step resets, or takes from elsewhere, the noise of the steps between two such ones is all that counts.
    """
    made = [{"p": trace.p, **trace.states} for trace in map(spec.trace, spec.at_steps(flags))]
    return frozenset(name for new in made for name, node in new.items() if node is not made[0].get(name))


def _encode_all(
    spec: Spec,
    storage: Storage,
    weight: Value,
    states: Mapping[str, Value],
    *,
    rare: frozenset[str],
    still: frozenset[str],
) -> tuple[list[Let], list[Store]]:
    """The random words, and the stores that keep a weight and the states.

    rare   states, or "p", that not every step stores, or not in the same way
    still  states that are not stored at this one
    """
    moving = [name for name in encoding_order(spec, storage) if name not in still]
    wants = {name: storage.states[name].noise_bits for name in moving}
    noise, words = deal({**wants, "p": storage.master.noise_bits(storage.param)}, rare)
    lets = [Let(f"noise_{k + 1}" if k else "noise", word, "encode") for k, word in enumerate(words)]
    stores: list[Store] = []
    roots: dict[str, Value] = {}
    bases = {normalizer(spec, name) for name in storage.states if storage.states[name].relative}
    for name in moving:
        fmt = storage.states[name]
        record = Recorder(name, "encode")
        value = Value(states[name].node, record)
        if fmt.plus_zero and not is_plus(value.node):
            value = value + 0.0  # -0 + 0 is +0
        if name in bases:
            # Divide by what will be read back, not by what was computed: the product is then exact.
            parts, roots[name] = fmt.encode_root(value, noise.get(name))
        else:
            root = roots[str(normalizer(spec, name))] if fmt.relative else None
            parts = fmt.encode(value, noise=noise.get(name), root=root)
        lets += record.lets()
        stores += [Store(b.name, parts[k].node) for k, b in state_buffers(spec, storage, name).items()]
    record = Recorder("p", "encode")
    parts = storage.master.encode(Value(weight.node, record), storage.param, noise=noise.get("p"))
    lets += record.lets()
    return lets, [Store(b.name, parts[k].node) for k, b in weight_buffers(storage).items()] + stores


def _buffers(spec: Spec, storage: Storage) -> tuple[Buffer, ...]:
    weight = weight_buffers(storage)
    out = [weight[""], Buffer("g", storage.param, spaces.elem, "grad", "g", writes=False)]
    out += [b for k, b in weight.items() if k]
    for name in storage.states:
        out += state_buffers(spec, storage, name).values()
    return tuple(out)


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


def lower(spec: Spec, flags: Mapping[str, bool], storage: Storage, *, alone: bool = False) -> Program:
    """One optimizer step as a Program: decode, the author's lets, encode.

    alone  the rule without a plan, see `lower_rule`
    """
    trace = spec.trace(dict(flags))
    draws = (Buffer(name, dtypes.f32, spaces.elem, "draw", name, writes=False) for name in trace.draws)
    buffers = (*_buffers(spec, storage), *draws)
    weight, states, decoded = _decode_all(spec, storage)
    g: Value = Value(ir.sym(GRAD_SCALE)) * cast(Value(ir.load("g", storage.param, spaces.elem)), dtypes.f32)
    leaves = {("p"): weight.node, "g": g.node} | {name: v.node for name, v in states.items()}

    def substitute(node: Node) -> Node:
        return leaves.get(node.attr, node) if node.op == "load" and node.dtype is dtypes.f32 else node

    # Spec leaves are f32 loads by logical name; a decode may load an f32 buffer of that same name, so the
    # author's expressions are rewritten before the two meet.
    signed, substituted = Rewriter(_signed(spec)), Rewriter(substitute)

    def rewrite(node: Node) -> Node:
        return substituted(signed(node))

    # A line whose draw nothing needs, as where a flag replaces its value, is none of the step.
    lets = [replace(let, node=rewrite(let.node)) for let in trace.lets if trace.needs_draws_of(let.node)]
    pairs = _pairs(spec, storage, alone)
    still = frozenset(settled(spec.unchanged(flags), dict(pairs)))
    new_weight, new_nodes = rewrite(trace.p), {name: rewrite(node) for name, node in trace.states.items()}
    body = [Let("g", g.node, "decode"), *decoded, *lets]
    new_states = {name: Value(node) for name, node in new_nodes.items()}
    rare = differing(spec, flags).union(*(untouched(spec, storage, found) for found in spec.at_steps(flags)))
    words, stores = _encode_all(spec, storage, Value(new_weight), new_states, rare=rare, still=still)
    body += words
    needed = [s.node for s in stores]
    used, live = (set(ir.loads(nodes)) for nodes in ([*(let.node for let in body), *needed], needed))
    buffers = tuple(
        replace(b, reads=b.name in live, writes=False) if b.owner in still else replace(b, reads=b.name in used)
        for b in buffers
    )
    kept = [KeptValue("p", weight.node, new_weight)]
    # A state that is read with values of rows and columns is not read back within the step: they change with it.
    elements = [n for n, v in states.items() if v.node.space == spaces.elem and storage.states[n].matrix is None]
    kept += [KeptValue(name, states[name].node, new_nodes[name]) for name in elements if name not in still]
    names = (part for h in spec.hypers for part in h.parts)
    present_host = spec.present_host(flags)
    return Program(
        name=spec.name,
        buffers=buffers,
        host=(),
        body=tuple(let for let in body if let.node.space is not spaces.host or let.stage == "update"),
        stores=tuple(stores),
        block=block_of(buffers),
        hypers=(*names, GRAD_SCALE, "step", *(h.name for h in present_host)),
        ranges=hyper_ranges(spec),
        doc=spec.doc,
        host_states=tuple((h.name, h.init) for h in present_host),
        host_stores=tuple(Let(name, node) for name, node in trace.host_states.items()),
        kept=tuple(kept),
        sums=tuple(dict.fromkeys(rewrite(node) for node, *_ in trace.sums)),
        together=pairs,
    )


PLAIN = Plan("Every value as it is: a rule before it meets a plan.", name="plain", small_numel=0)


def plain_storage(spec: Spec, flags: Mapping[str, bool]) -> Storage:
    """The weight and all states in fp32, none relative."""
    present = spec.present(flags)
    nonneg = frozenset(s.name for s in present if s.nonneg)
    return Storage(PLAIN, dtypes.f32, False, Native(), {s.name: floats.f32 for s in present}, nonneg)


def lower_rule(spec: Spec, flags: Mapping[str, bool]) -> Program:
    """One step of the rule alone: weight, gradient and states are fp32, whatever a plan makes of them.

    States that a plan may store relative to one another are stored in one sweep, and both where one of them changes.
    """
    return lower(spec, flags, plain_storage(spec, flags), alone=True)
