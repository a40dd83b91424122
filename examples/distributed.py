"""Data parallel training by torchrun: DistributedDataParallel, or fully_shard (FSDP2).

    torchrun --nproc-per-node 2 examples/distributed.py --steps 20 --way ddp
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optgen.optim import AdamW


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def train(way: str, steps: int, device: torch.device) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network().to(device)
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, plan="int8_split24")
    for k in range(steps):
        random = torch.Generator().manual_seed(size * k + rank)
        tokens, wanted = torch.randint(32, (2, 16), generator=random).to(device)
        nn.functional.cross_entropy(model(tokens), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    sums = torch.stack([p.detach().double().sum() for p in whole])
    every = [torch.empty_like(sums) for _ in range(size)]
    dist.all_gather(every, sums)
    if rank == 0:
        same = all(torch.equal(sums, other) for other in every)
        print(f"{size} ranks, {'the same weights' if same else 'DIFFERENT weights'}; {optimizer.memory()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--way", default="ddp", choices=("ddp", "fsdp2"))
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    # The model is gone before its process group is: a DistributedDataParallel that outlives it may wait forever.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    train(given.way, given.steps, device)
    dist.destroy_process_group()
    if not on_gpu:
        # Gloo's threads live as long as DTensor's caches do, and may drop their last tensor when the interpreter is
        # gone already, which aborts the process (torch's issue 190489; 3 of 52 runs here): leave before it goes.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
