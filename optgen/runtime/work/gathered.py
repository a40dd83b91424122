"""Parameters of several ranks that every rank steps as a whole, and then keeps its part of.

That is vectors whose parts cut storage blocks, whose states all ranks keep; what eager torch computes of rules that
sum over tensors; and matrices in blocks of unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from optgen.runtime.layout import messages, sharded_states, sharding
from optgen.runtime.work.bucket import Bucket


def _shards(buckets: Iterable[Bucket]) -> list[tuple[Bucket, int, sharded_states.ShardedParameter]]:
    """Return the buckets' parameters of several ranks, in the order in which ranks send."""
    found = [(b, i, shard) for b in buckets for i, shard in enumerate(b.shards) if shard is not None]
    return sorted(found, key=lambda x: x[2].position)


def collect(buckets: Iterable[Bucket]) -> None:
    """Parameters and gradients of such parameters, whole; and where all others lie."""
    found = _shards(buckets)
    for b, i, shard in found:
        if i in b.pieces or (b.backend == "reference" and b.variant.stages and shard.layout.dims()):
            shard.whole = True
    wanted = [(b, i, shard.layout) for b, i, shard in found if shard.whole]
    whole = iter(messages.gather([(of, x) for b, i, of in wanted for x in (b.params[i], b.grads[i])]))
    for (b, i, of), p, g in zip(wanted, whole, whole, strict=True):
        b.written.append((b.params[i], sharding.part_of(p, of)))
        b.params[i], b.grads[i] = p, g
    for b in {id(b): b for b, *_ in found}.values():
        b.settle()


def collect_states(buckets: Iterable[Bucket]) -> None:
    """Their states, where ranks keep parts of them."""
    wanted = []
    for b, i, shard in _shards(buckets):
        for f in b.variant.fields if shard.whole and not shard.gathered else ():
            of = sharding.field_layout(f, shard.layout)
            if of.dims():
                wanted.append((b, i, f.name, of))
    whole = messages.gather([(of, b.states[i][name]) for b, i, name, of in wanted])
    for (b, i, name, of), x in zip(wanted, whole, strict=True):
        b.written.append((b.states[i][name], sharding.part_of(x, of)))
        b.states[i] = {**b.states[i], name: x}
