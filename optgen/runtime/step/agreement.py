"""The agreement of ranks on who has gradients, before they wait for one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import layout, plans, sharding
from optgen.runtime.layout.plans import Label
from optgen.runtime.options.entries import Entry
from optgen.runtime.records import Matrix, keys
from optgen.runtime.reference import matrices as functions
from optgen.runtime.step.choice import GroupChoices
from optgen.runtime.work import counting, workers
from optgen.runtime.work.bucket import Bucket


class Sender(NamedTuple):
    """A DTensor in whose step, this or another one, ranks send one another something.

    flops   of the functions of whole matrices that are called for each of its matrices; 0: none is
    """

    p: Any
    name: Label
    matrix: Matrix
    flops: int


def gradients_elsewhere(cls: Any, sending: Sequence[Sender]) -> dict[Tensor, Tensor]:
    """Return zeros for each of `senders` that has a gradient on other ranks only, which wait for this one."""
    if not sending:
        return {}
    if counting.capturing():
        raise RuntimeError(
            f"{cls.__name__}: a CUDA graph is being captured, but ranks agree on who has gradients at each "
            f"step of this rule over parts of tensors, for which the host waits: leave step() out of the graph"
        )
    params = [sender.p for sender in sending]
    found = sharding.agreed(params)
    return {p: torch.zeros_like(p) for p, has in zip(params, found, strict=True) if has and p.grad is None}


def share(buckets: Iterable[Bucket], sending: Sequence[Sender]) -> None:
    """Give shards the workers of their matrices: the work of all trainable parameters over a mesh is shared at once, so
    that it depends on no gradient, and begins with a rank that depends on the first one's name."""
    found: dict[Tensor, tuple[int, ...]] = {}
    called = [sender for sender in sending if sender.flops]
    for mesh in dict.fromkeys(sender.p.device_mesh for sender in called):
        some = [sender for sender in called if sender.p.device_mesh == mesh]
        stacks = tuple(workers.Stack(x.p.shape, sharding.layout_of(x.p).cuts, x.matrix, x.flops) for x in some)
        start = keys.stream_key(some[0].name)
        found |= zip((x.p for x in some), workers.assign(stacks, tuple(mesh.shape), start), strict=True)
    for bucket in buckets:
        if any(stage.space == "call" for stage in bucket.variant.stages):
            for shard, stream in zip(bucket.shards, bucket.streams, strict=True):
                if shard is not None:
                    alone = workers.Stack(shard.p.shape, shard.layout.cuts, bucket.variant.matrix, 1)  # it is frozen
                    own = found.get(shard.p) or workers.assign((alone,), shard.layout.mesh_shape, stream)[0]
                    shard.workers = own


def senders(cls: Any, listed: Sequence[Entry]) -> list[Sender]:
    """Return the trainable parameters in whose step, this or another one, ranks send one another something.

    Which step this is follows from how many were made, so that ranks have to count alike.
    """
    sharded = sharding.kind()
    if sharded is None:
        return []
    found: list[Sender] = []
    number, choices = -1, None
    for entry in listed:
        if not isinstance(entry.p, sharded) or not entry.p.requires_grad:
            continue
        if choices is None or entry.number != number:
            number, choices = entry.number, GroupChoices(cls, entry.group, False)
        choice, variant = choices.find(entry)
        of = sharding.layout_of(entry.p)
        stages = [s for v in plans.at_steps(choice.plan, variant, cls.FLAGS) for s in v.stages] if of.dims() else []
        if stages or (of.dims() and sharding.mode(variant, of) == "gathered"):
            shape = layout.matrix_shape(variant.matrix, of.shape)[-2:]
            flops = sum(functions.FLOPS[s.kernel](*shape) for s in stages if s.space == "call")
            found.append(Sender(entry.p, entry.name, variant.matrix, flops))
    return found
