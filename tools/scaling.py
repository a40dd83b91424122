"""Count the bytes that a rank of many keeps and sends in a step, without the other ranks.

    python tools/scaling.py [--ranks 1024] [--rank 0]

The optimizer's own code makes a step over parameters without memory, with torch's process group that sends nothing;
kernels are left out, messages are counted.  The parameters are those of a model of 70 billion weights, cut along
dimension 0 as fully_shard cuts them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import generated  # noqa: E402
from optgen.runtime.cpu import cpu  # noqa: E402
from optgen.runtime.layout import layout, sharding  # noqa: E402
from optgen.runtime.step import backends  # noqa: E402

RULES = ("AdamW", "Lion", "LAMB", "StableAdamW", "Adafactor", "CAME", "Prodigy", "ClippedAdamW")
MATRICES_ONLY = ("CAME",)
PLAN = "int8_split24"


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
    opt = getattr(generated, rule)(params, plan=PLAN)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=0, help="whose messages are counted")
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=arguments.rank, world_size=arguments.ranks)
    print("\n".join(table(arguments.ranks)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
