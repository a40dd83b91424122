"""The messages of ranks in a step: sums, whole tensors, pieces of matrices, and who has gradients.

It follows from what all of them know: shapes, meshes, placements, plans, and who has a gradient, which is agreed on
first wherever something will be sent.  So no rank waits for one that does not come.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optgen.runtime.layout.sharding import Layout, is_sharded, largest_part, layout_of, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ALIGNMENT = 64
"""Bytes to which tensors are aligned in a message."""


@dataclass(slots=True)
class Sum:
    """Values of a part that become those of the tensor.

    position  the parameter's number over all groups, in the order of which ranks send: 3
    groups    the ranks that hold the other parts: [(mesh, 0)], of mesh dimension 0
    largest   True if the largest is wanted, not the sum
    value     fp32, contiguous; written
    """

    position: int
    groups: list[tuple[DeviceMesh, int]]
    largest: bool
    value: Tensor


Pieces = Sequence[tuple[int, Tensor]]
"""Views that are sent to ranks of a mesh, or received from them; ranks are numbered as the mesh lists them."""


@dataclass(slots=True)
class Move:
    """Pieces of tensors that change ranks: [(2, view)] goes to, or comes from, rank 2 of the mesh.

    Two ranks list the pieces that go from one to the other in one order.
    """

    mesh: DeviceMesh
    sends: Pieces
    receives: Pieces


@dataclass(slots=True)
class Exchange:
    """The requests of a step to other ranks: sums, and pieces of tensors."""

    sums: list[Sum] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


def serve(exchanges: Iterable[Exchange]) -> None:
    """Send one message per group of ranks for all sums, one for all maxima, one for all pieces between two ranks."""
    found = list(exchanges)
    reduce([s for e in found for s in e.sums])
    move([m for e in found for m in e.moves])


def reduce(items: Sequence[Sum]) -> None:
    """Adds up (or takes the largest of) what all ranks have; in place."""
    import torch.distributed as dist

    items = sorted(items, key=lambda item: item.position)
    for depth in range(max((len(item.groups) for item in items), default=0)):
        together: dict[tuple[str, bool, torch.device], tuple[Any, list[Tensor]]] = {}
        for item in items:
            if depth < len(item.groups):
                mesh, dim = item.groups[depth]
                group = mesh.get_group(dim)
                key = group.group_name, item.largest, _sent_from(mesh, item.value.device)
                together.setdefault(key, (group, []))[1].append(item.value)
        for (_, largest, device), (group, values) in together.items():
            flat = torch.cat([value.reshape(-1) for value in values]).to(device)
            if largest:
                ordered = _ordered(flat)
                dist.all_reduce(ordered, dist.ReduceOp.MAX, group=group)
                size = ordered.abs().view(torch.float32)
                flat = torch.where(ordered < 0, -size, size)
            else:
                dist.all_reduce(flat, group=group)
            for value, new in zip(values, torch.split(flat, [value.numel() for value in values]), strict=True):
                value.copy_(new.view(value.shape))


def _sent_from(mesh: DeviceMesh, device: torch.device) -> torch.device:
    """Return the device that a tensor is sent from: the mesh's, because its ranks may have no way between others (NCCL
    has none between CPUs, where states that are offloaded lie); what has no memory stays so."""
    return device if device.type in ("meta", mesh.device_type) else torch.device(mesh.device_type)


def _ordered(x: Tensor) -> Tensor:
    """fp32 as int32 in the same order, NaN above all: what is largest is then the same for every way of sending."""
    bits = torch.where(x.isnan(), torch.nan, x).abs().view(torch.int32)
    return torch.where((x < 0) & ~x.isnan(), -bits, bits)


def gather(parts: Sequence[tuple[Layout, Tensor]]) -> list[Tensor]:
    """Return the tensors of which ranks have these parts, whole."""
    import torch.distributed as dist

    send = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # named anew in torch 2.13
    together: dict[tuple[Any, tuple[int, ...], torch.device], list[int]] = {}
    for k, (of, value) in enumerate(parts):
        together.setdefault((of.mesh, tuple(of.dims()), _sent_from(of.mesh, value.device)), []).append(k)
    whole = [value for _, value in parts]
    for (mesh, dims, device), numbers in together.items():
        some = [parts[k] for k in numbers]
        room = [-(-largest_part(of) * value.element_size() // ALIGNMENT) * ALIGNMENT for of, value in some]
        packed = torch.zeros(sum(room), dtype=torch.uint8, device=device)
        for (_, value), piece in zip(some, torch.split(packed, room), strict=True):
            data = value.contiguous().reshape(-1).view(torch.uint8)
            piece[: data.numel()].copy_(data)
        for dim in dims:
            out = torch.empty(mesh.size(dim) * packed.numel(), dtype=torch.uint8, device=device)
            send(out, packed, group=mesh.get_group(dim))
            packed = out
        pieces = packed.view(*(mesh.size(dim) for dim in reversed(dims)), sum(room))
        for k, data in zip(numbers, torch.split(pieces, room, dim=-1), strict=True):
            whole[k] = _joined(*parts[k], dims, data)
    return whole


def _joined(of: Layout, part: Tensor, dims: Sequence[int], pieces: Tensor) -> Tensor:
    """Return the tensor of all parts; `pieces`: their bytes, by coordinates along these mesh dimensions, last first."""
    whole, size = torch.empty(of.shape, dtype=part.dtype, device=part.device), part.element_size()
    if len(dims) == 1 and of.cuts[dims[0]] == (0, 1):
        # Equal parts one after the other, but for the last one: no need to look at each.
        data = pieces[:, : largest_part(of) * size].reshape(-1)[: whole.numel() * size]
        return whole.copy_(data.view(part.dtype).view(whole.shape))
    for coordinate in of.coordinates():
        spans = of.at(coordinate)
        shape = [b - a for a, b in spans]
        data = pieces[tuple(coordinate[dim] for dim in reversed(dims))][: math.prod(shape) * size]
        whole[tuple(slice(a, b) for a, b in spans)] = data.view(part.dtype).view(shape)
    return whole


def full(x: Any) -> Any:
    """Return all of a DTensor, for which all ranks of its mesh ask; anything else as it is."""
    return gather([(layout_of(x), local(x).detach())])[0] if is_sharded(x) else x


def move(items: Sequence[Move]) -> None:
    """Bring pieces of tensors to the ranks that receive them."""
    import torch.distributed as dist

    for mesh in dict.fromkeys(item.mesh for item in items):
        group, order = _all_ranks(mesh, dist.group.WORLD)
        some = [item for item in items if item.mesh == mesh]
        read, packed, out, sizes = _buffer(mesh, order, [piece for item in some for piece in item.sends])
        written, arrived, into, expected = _buffer(mesh, order, [piece for item in some for piece in item.receives])
        if read:
            torch._foreach_copy_(packed, read)
        dist.all_to_all_single(into, out, expected, sizes, group=group)
        if written:
            torch._foreach_copy_(written, arrived)


def _buffer(
    mesh: DeviceMesh, order: Sequence[int], pieces: Pieces
) -> tuple[list[Tensor], list[Tensor], Tensor, list[int]]:
    """Return pieces by rank, their places in a buffer, it, and how many of its bytes are each rank's."""
    found = [x for _, x in sorted(pieces, key=lambda piece: order[piece[0]])]
    room = [-(-x.nbytes // 8) * 8 for x in found]  # any dtype may begin there
    sizes = [0] * len(order)
    for rank, x in pieces:
        sizes[order[rank]] += -(-x.nbytes // 8) * 8
    device = _sent_from(mesh, found[0].device) if found else mesh.device_type
    flat = torch.empty(sum(room), dtype=torch.uint8, device=device)
    places = [y[: x.nbytes].view(x.dtype).view(x.shape) for x, y in zip(found, torch.split(flat, room), strict=True)]
    return found, places, flat, sizes


@functools.lru_cache(maxsize=64)
def _all_ranks(mesh: DeviceMesh, world: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the group of all ranks of a mesh, made if there is none, and the place of each in it.

    world   the default group: a new one has new groups
    """
    import torch.distributed as dist

    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim == 1:
        group = mesh.get_group()
    elif len(ranks) == dist.get_world_size():
        group = world
    else:
        group = dist.new_group(ranks, use_local_synchronization=True)
    return group, tuple(dist.get_group_rank(group, rank) for rank in ranks)


def agreed(params: Sequence[tuple[Tensor, DeviceMesh]]) -> list[bool]:
    """Return, for each parameter, True if any rank of its mesh has a gradient of it.

    One byte for each parameter goes around each mesh dimension, and the host waits for it.
    """
    found = [p.grad is not None for p, _ in params]
    for mesh in dict.fromkeys(mesh for _, mesh in params):
        own = [i for i, (_, x) in enumerate(params) if x == mesh]
        for i, has in zip(own, _on_any_rank(mesh, [found[i] for i in own]), strict=True):
            found[i] = has
    return found


def unlike(mesh: DeviceMesh, values: Sequence[Tensor]) -> list[bool]:
    """Return True for each number (int64, 0-dim) that is not the same on all ranks of a mesh; the host waits for it."""
    import torch.distributed as dist

    own = torch.stack([x.to(mesh.device_type) for x in values])
    largest = torch.stack([own, ~own])  # ~x falls as x rises, and never overflows
    for dim in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return list(map(bool, (largest[0] != ~largest[1]).tolist()))


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a number (int64, 0-dim) that follows from the bits of tensors, wherever they lie."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        words = torch.zeros(-(-x.nbytes // 8), dtype=torch.int64, device=x.device)
        words.view(torch.uint8)[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        total = 31 * total + words.sum().to(device)
    return total


def anywhere(found: bool, params: Iterable[Any]) -> bool:
    """Return True if it was found on any rank of the meshes over which these parameters lie, all of which ask."""
    for mesh in dict.fromkeys(p.device_mesh for p in params if is_sharded(p)):
        (found,) = _on_any_rank(mesh, [found])
    return found


def _on_any_rank(mesh: DeviceMesh, found: list[bool]) -> list[bool]:
    """Return, for each value, True if it is True on any rank of the mesh; on ranks outside of it, the values."""
    import torch.distributed as dist

    if mesh.get_coordinate() is None:
        return found
    have = torch.tensor(found, dtype=torch.uint8, device="cpu").to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(have, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return list(map(bool, have.tolist()))
