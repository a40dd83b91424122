"""Parameters of several ranks that every rank steps as a whole, and then keeps its part of.

That is vectors whose parts cut storage blocks, whose states all ranks keep; what eager torch computes of rules that
sum over tensors; and matrices in blocks of unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from optgen.runtime.layout import sharding
from optgen.runtime.work.bucket import Bucket


def collect(buckets: Iterable[Bucket]) -> None:
    """Parameters and gradients of such parameters, whole; and where all others lie."""
    found = [(b, i, shard) for b in buckets for i, shard in enumerate(b.shards) if shard is not None]
    for b, i, shard in found:
        if i in b.pieces or (b.backend == "reference" and b.variant.stages and shard.layout.dims()):
            shard.whole = True
    found.sort(key=lambda x: x[2].position)
    wanted = [
        (b, i, shard, sharding.Whole(shard.layout, b.params[i]), sharding.Whole(shard.layout, b.grads[i]))
        for b, i, shard in found
        if shard.whole
    ]
    sharding.gather([w for *_, p, g in wanted for w in (p, g)])
    for b, i, shard, p, g in wanted:
        assert p.found is not None and g.found is not None
        b.written.append((b.params[i], sharding.part_of(p.found, shard.layout)))
        b.params[i], b.grads[i] = p.found, g.found
    for b in {id(b): b for b, *_ in found}.values():
        b.settle()


def collect_states(buckets: Iterable[Bucket]) -> None:
    """Their states, where ranks keep parts of them."""
    found = [
        (b, i, shard)
        for b in buckets
        for i, shard in enumerate(b.shards)
        if shard is not None and shard.whole and not shard.gathered
    ]
    found.sort(key=lambda x: x[2].position)
    wanted = []
    for b, i, shard in found:
        for f in b.variant.fields:
            of = sharding.field_layout(f, shard.layout)
            if of.dims():
                wanted.append((b, i, f.name, sharding.Whole(of, b.states[i][f.name])))
    sharding.gather([item for *_, item in wanted])
    for b, i, name, item in wanted:
        assert item.found is not None
        b.written.append((b.states[i][name], sharding.part_of(item.found, item.layout)))
        b.states[i] = {**b.states[i], name: item.found}
