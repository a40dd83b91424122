"""Count the bytes that a rank of many keeps and sends in a step, and its work on whole matrices, without other ranks.

    python -m docs.tools.scaling [--ranks 1024] [--rank 0]     # those of docs/scaling.md and benchmarks/workers.md

The optimizer's own code makes a step over parameters without memory, with torch's process group that sends nothing;
kernels are left out, messages are counted.  The parameters are those of a model of 70 billion weights, cut along
dimension 0 as fully_shard cuts them.  The matrices of Muon, SOAP and Shampoo are shared out as the optimizer does it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from optgen import optim
from optgen.runtime.cpu import cpu
from optgen.runtime.layout import layout, sharding, workspace
from optgen.runtime.reference.matrices import FLOPS
from optgen.runtime.step import backends
from optgen.runtime.work import workers

RULES = ("AdamW", "Lion", "LAMB", "StableAdamW", "Adafactor", "CAME", "Prodigy", "ClippedAdamW")
MATRICES_ONLY = ("CAME",)
PLAN = "int8_split24"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 5
"""Rounds of Newton-Schulz, Muon's `ns_steps`; each has three products."""
LONGEST = 10000
"""The default of `max_precond_dim`."""


def shapes() -> list[tuple[int, ...]]:
    """Return 80 layers of width 8192, 28672 in the middle, 8 heads of keys and values; 128256 tokens at both ends."""
    wide, middle, keys = 8192, 28672, 1024
    layer: list[tuple[int, ...]] = [(wide, wide), (keys, wide), (keys, wide), (wide, wide)]
    layer += [(middle, wide), (middle, wide), (wide, middle), (wide,), (wide,)]
    return [(128256, wide), *layer * 80, (wide,), (128256, wide)]


Sent = dict[str, list[int]]
"""The bytes of every message that a rank sends, by the kind of the message."""


class Row(NamedTuple):
    """A rule on one of many ranks: elements and bytes of its parameters and states there, and what a step sends."""

    rule: str
    parameters: int
    elements: int
    weights: int
    states: int
    sent: Sent


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Count the messages that are sent inside."""
    sent: Sent = {}

    def reduce(value: torch.Tensor, *_: Any, **__: Any) -> None:
        kind = "agreement" if value.dtype is torch.uint8 else "all-reduce"
        sent.setdefault(kind, []).append(value.numel() * value.element_size())

    def gather(_: torch.Tensor, value: torch.Tensor, **__: Any) -> None:
        sent.setdefault("all-gather", []).append(value.numel() * value.element_size())

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with mock.patch.object(dist, "all_reduce", reduce), mock.patch.object(dist, name, gather):
        yield sent


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let steps do everything but compute."""

    def nothing(*_: Any) -> int:
        return 0

    with (
        mock.patch.object(cpu, "kernels", lambda buckets: [nothing for _ in buckets]),
        mock.patch.object(backends, "choose", return_value="cpp"),
        mock.patch.object(layout, "encode", return_value={}),
    ):
        yield


def row(rule: str, ranks: int) -> Row:
    """Make the first step of a rule, which makes the states, too."""
    mesh = init_device_mesh("cpu", (ranks,))
    params = []
    for shape in shapes():
        if rule in MATRICES_ONLY and len(shape) < 2:
            continue
        of = sharding.Layout(mesh, (Shard(0),), torch.Size(shape))
        assert of.here is not None
        part = torch.empty([b - a for a, b in of.here], dtype=torch.bfloat16, device="meta")
        params.append(nn.Parameter(sharding.wrapped(part, of)))
    opt = getattr(optim, rule)(params, plan=PLAN)
    with without_kernels():
        for p in params:
            p.grad = torch.zeros_like(p)
        with counted() as sent:
            opt.step()
    here = [p.to_local() for p in params]
    states = [x.to_local() for entry in opt.state.values() for x in entry.values() if isinstance(x, DTensor)]
    return Row(rule, len(params), sum(p.numel() for p in here), _bytes(here), _bytes(states), sent)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def table(ranks: int) -> list[str]:
    """Return the table, a rule in each line."""
    lines = [
        "| rule | weights, MiB | states, MiB | all-reduces | KiB | all-gathers | MiB | agreement, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        found = row(rule, ranks)
        reduces, gathers, agreement = (found.sent.get(k, []) for k in ("all-reduce", "all-gather", "agreement"))
        lines.append(
            f"| {rule} | {found.weights / 2**20:.1f} | {found.states / 2**20:.1f} | {len(reduces)} "
            f"| {sum(reduces) / 2**10:.0f} | {len(gathers)} | {sum(gathers) / 2**20:.2f} | {sum(agreement)} |"
        )
    return lines


def models() -> dict[str, list[tuple[int, ...]]]:
    """Return the matrices that Muon has in models of public configurations; experts are stacks."""
    llama = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    qwen: list[tuple[int, ...]] = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048)]
    qwen += [(128, 768, 2048), (128, 768, 2048), (128, 2048, 768)]
    wide, middle, heads = 7168, 2048, 64
    attention: list[tuple[int, ...]] = [(1536, wide), (heads * 192, 1536), (576, wide), (heads * 256, 512)]
    attention.append((wide, heads * 128))
    dense, shared = ([(size, wide), (size, wide), (wide, size)] for size in (18432, middle))
    experts = [(384, wide), (384, middle, wide), (384, middle, wide), (384, wide, middle)]
    kimi = [*attention, *dense, *[*attention, *shared, *experts] * 60]
    return {"Llama-3.1-8B": [*llama] * 32, "Qwen3-30B-A3B": qwen * 48, "Kimi K2": kimi}


class Share(NamedTuple):
    """The work of each rank in a step: operations, bytes that it sends, calls for a batch of matrices."""

    flops: list[int]
    sent: list[int]
    batches: list[int]


class Work(NamedTuple):
    """A rule's step of one matrix under the plan.

    cost      by which ranks share the work, in the rule's unit
    elements  bytes of each element that go to its worker, and back
    factors   side of each factor that it has, bytes that go there and back
    calls     bytes of the operands of each function
    """

    cost: int
    flops: int
    elements: tuple[int, int]
    factors: tuple[tuple[int, int, int], ...]
    calls: tuple[int, ...]


def work(rule: str, refresh: bool, m: int, n: int) -> Work:
    """Return that of an m x n matrix in a step that refreshes bases or roots or does not.

    Of SOAP each side up to 10,000 has a factor; Shampoo takes AdamW where one is longer.  Operations of a decomposition
    are those that `optgen explain` says.
    """
    if rule == "Muon":
        flops = ROUNDS * FLOPS["newton_schulz"](m, n)
        return Work(flops, flops, (2, 2), (), (2 * m * n,))
    sides, size = [k for k in (m, n) if k <= LONGEST], m * n
    triangle = [k * (k - 1) // 2 * 33 // 32 + 4 * k for k in sides]  # 8 bits, scales of 64, an fp32 diagonal
    if rule == "SOAP":
        bases = [k * k * 33 // 32 for k in sides]
        flops = sum(6 * size * k + refresh * (16 * k**3 + 4 * size * k) for k in sides)
        returned = [t + refresh * q for t, q in zip(triangle, bases, strict=True)]
        going = [t + q for t, q in zip(triangle, bases, strict=True)]
        elements = (16, 16) if refresh else (8, 8)
        calls = (4 * size + sum(bases), elements[0] * size + sum(going))
    else:
        sides = sides if len(sides) == 2 else []
        flops, elements = sum(4 * size * k + refresh * 11 * k**3 for k in sides), (8, 4)
        going = [4 * k * k + t for k, t in zip(sides, triangle, strict=False)]
        returned = [4 * k * k + refresh * t for k, t in zip(sides, triangle, strict=False)]
        calls = (8 * size + sum(going),)
    return Work(size * sum(sides), flops, elements, tuple(zip(sides, going, returned, strict=True)), calls)


def share(shapes: list[tuple[int, ...]], ranks: int, rule: str = "Muon", refresh: bool = False) -> Share:
    """Share matrices that are cut along dimension 0; over one rank: what each does without workers."""
    cuts: sharding.Cuts = ((0, 1),)
    stepped = [(s, x) for s in shapes if (x := work(rule, refresh, *s[-2:])).cost]
    stacks = tuple(workers.Stack(torch.Size(s), cuts, "last", x.cost) for s, x in stepped)
    flops, sent = [0] * ranks, [0] * ranks
    rounds: dict[tuple[int, int], tuple[int, int]] = {}
    batches: list[set[object]] = [set() for _ in range(ranks)]
    for stack, chosen, (_, x) in zip(stacks, workers.assign(stacks, (ranks,)), stepped, strict=True):
        *_, rows, columns = stack.shape
        for worker in chosen:
            flops[worker] += x.flops
            for call, operands in enumerate(x.calls):
                number, filled = rounds.get((worker, call), (0, 0))
                if filled and filled + operands > workspace.USUAL // 2:
                    number, filled = number + 1, 0
                rounds[worker, call] = number, filled + operands
                batches[worker].add((call, number, rows, columns))
        stacked = len(stack.shape) > 2
        for rank in range(ranks):
            start, stop = sharding.chunk(stack.shape[0], ranks, rank)
            going, back = (y * columns * (rows if stacked else stop - start) for y in x.elements)
            for k, there, here in x.factors:
                first, last = (0, k) if stacked else sharding.chunk(k, ranks, rank)
                going, back = going + there * (last - first) // k, back + here * (last - first) // k
            for worker in chosen[start:stop] if stacked else chosen:
                if worker != rank:
                    sent[rank] += going
                    sent[worker] += back
    return Share(flops, sent, list(map(len, batches)))


HEAD = (
    "| model | ranks | TFLOP of a rank | busiest | to bound | MiB of a rank | most | bytes/element | batches | most |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)
FACTORED_HEAD = (
    "| rule | model | ranks | TFLOP of a rank | busiest | to bound | most MiB | bytes/element | most batches "
    "| refresh: busiest | to bound | most MiB |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def matrices(name: str, sizes: tuple[int, ...] = SIZES) -> list[str]:
    """Return the lines of a model in the table of Muon's work, one for each number of ranks."""
    shapes, lines = models()[name], []
    alone = share(shapes, 1)
    size = sum(2 * math.prod(shape) for shape in shapes)
    for ranks in sizes:
        found = share(shapes, ranks)
        lines.append(
            f"| {name} | {ranks} | {alone.flops[0] / 1e12:.0f} | {max(found.flops) / 1e12:.1f} "
            f"| {_to_bound(found, shapes):.3f} "
            f"| {size * (ranks - 1) / ranks / 2**20:.0f} | {max(found.sent) / 2**20:.0f} "
            f"| {sum(found.sent) / size * 2:.2f} | {alone.batches[0]} | {max(found.batches)} |"
        )
    return lines


def factored(rule: str, name: str, sizes: tuple[int, ...] = (8, 32, 128, 512, 1024)) -> list[str]:
    """Return the lines of a model in the table of a rule with factors, usual steps and those that refresh."""
    shapes, lines = models()[name], []
    size = sum(math.prod(s) for s in shapes if work(rule, False, *s[-2:]).cost)
    for ranks in sizes:
        usual, late = (share(shapes, ranks, rule, refresh) for refresh in (False, True))
        lines.append(
            f"| {rule} | {name} | {ranks} | {sum(usual.flops) / 1e12:.0f} | {max(usual.flops) / 1e12:.1f} "
            f"| {_to_bound(usual, shapes, rule):.3f} | {max(usual.sent) / 2**20:.0f} | {sum(usual.sent) / size:.2f} "
            f"| {max(usual.batches)} | {max(late.flops) / 1e12:.1f} | {_to_bound(late, shapes, rule, True):.3f} "
            f"| {max(late.sent) / 2**20:.0f} |"
        )
    return lines


def _to_bound(found: Share, shapes: list[tuple[int, ...]], rule: str = "Muon", refresh: bool = False) -> float:
    """Return the operations of the busiest rank over the mean of all or those of the largest matrix, if more."""
    largest = max(work(rule, refresh, *shape[-2:]).flops for shape in shapes)
    return max(found.flops) / max(sum(found.flops) / len(found.flops), largest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=0, help="whose messages are counted")
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=arguments.rank, world_size=arguments.ranks)
    print("\n".join(table(arguments.ranks)))
    dist.destroy_process_group()
    print("\n".join(["", *HEAD, *(line for name in models() for line in matrices(name))]))
    pairs = itertools.product(("SOAP", "Shampoo"), models())
    print("\n".join(["", *FACTORED_HEAD, *(line for rule, name in pairs for line in factored(rule, name))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
