"""Peak memory of whole training steps: weights, gradients, states and what a step needs beside them.

    python -m tools.bench memory               the GPU's memory where there is one, else this process's
    python -m tools.bench memory --layers 64 --width 512 --ways released torch

Every way trains the same chain of square layers in a process of its own, on a batch so small that activations vanish,
and says by how much its memory grew from before the model was made: on a GPU torch.cuda.max_memory_allocated, on a CPU
the largest resident set (Linux).  Writes docs/benchmarks/memory-<name>.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from optgen.accumulate import accumulator
from optgen.optim import AdamW, Lion, Prodigy
from tools.bench.race import cpu_model, end_with_parent, save, write
from tools.prose import table

ROOT = Path(__file__).resolve().parents[2]

WAYS: dict[str, str] = {
    "torch": "torch.optim.AdamW, fp32 weights",
    "torch-bf16": "torch.optim.AdamW, bf16 weights and states",
    "fp32": "AdamW, plan fp32, fp32 weights",
    "ordinary": "AdamW, plan int8_split24, bf16 weights",
    "released": "the same, gradients released",
    "accumulated": "the same, 4 micro-batches summed in p.grad",
    "accumulated-int8": "the same, 4 micro-batches summed in 8 bits",
    "lion-released": "Lion, plan int8_split24, bf16 weights, gradients released",
    "prodigy": "Prodigy, plan int8_split24, bf16 weights",
    "prodigy-released": "the same, gradients released by sums of the step before",
    "ddp": "AdamW, plan int8_split24, bf16 weights, under DistributedDataParallel",
    "sharded-released": "the same on 2 ranks of fully_shard without resharding, gradients released",
}

EXACT = {"torch": 16.0, "torch-bf16": 8.0, "fp32": 16.0}
"""Bytes per parameter by counting, gradients included, where the optimizer cannot say it itself."""


def resident(which: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {which}")


class Meter:
    """The growth of memory since construction: of the GPU's allocator, or of this process."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.again()
        self.start = torch.cuda.memory_allocated() if self.cuda else resident("VmRSS")

    def again(self) -> None:
        """Forget the largest so far."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else resident("VmHWM")) - self.start


def measure(way: str, layers: int, width: int, steps: int) -> dict[str, Any]:
    """Train in this process; return the bytes at the peak, and their least number by counting."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if way in ("torch", "fp32") else torch.bfloat16
    micro = 4 if way.startswith("accumulated") else 1
    sums = accumulator("int8") if way == "accumulated-int8" else None

    def prepare(count: int, size: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, device=device, dtype=dtype) for _ in range(count)))
        if way.startswith("torch"):
            return model, torch.optim.AdamW(model.parameters(), foreach=False)
        if way == "sharded-released":
            for part in (*model, model):
                fully_shard(part, reshard_after_forward=False)
        rule = {"lion": Lion, "prodigy": Prodigy}.get(way.partition("-")[0], AdamW)
        optimizer = rule(model.named_parameters(), lr=1e-4, plan="fp32" if way == "fp32" else "int8_split24")
        if way.endswith("released") or way.startswith("accumulated"):
            optimizer.release_gradients(model, accumulate=micro, accumulator=sums, sums="previous")
        return (DistributedDataParallel(model) if way == "ddp" else model), optimizer

    def train(model: nn.Module, optimizer: Any, count: int) -> None:
        x = torch.randn(2, next(iter(model.parameters())).shape[1], device=device, dtype=dtype)
        for _ in range(count):
            for _ in range(micro):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if way in ("ddp", "sharded-released"):
        folder = tempfile.mkdtemp()
        rank = 0 if os.fork() else 1
        torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    train(*prepare(2, 128), 2)  # kernels are compiled, libraries loaded
    meter = Meter()
    model, optimizer = prepare(layers, width)
    train(model, optimizer, 1)
    first = meter.peak()  # states are made in it
    meter.again()
    train(model, optimizer, steps - 1)
    later = meter.peak()
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        os._exit(0)
    numel = layers * width * width
    kept = EXACT[way] if way in EXACT else optimizer.memory().per_element
    kept += 2 if way in ("ordinary", "accumulated", "prodigy", "ddp") else 0  # gradients in bf16
    kept = kept / 2 + 2 if way == "sharded-released" else kept  # half of all, and whole weights while they are used
    kept += 1 + 2 / 64 if sums is not None else 0  # a byte, and two for each block of 64
    return {
        "way": way, "parameters": numel, "steps": steps, "device": str(device), "first": first / numel,
        "per_parameter": later / numel, "counted": kept,
    }  # fmt: skip


def run(way: str, layers: int, width: int, steps: int, seconds: float | None = None) -> dict[str, Any]:
    """Run `measure` in a process of its own, whose allocator returns memory at once, for so many seconds at most."""
    sizes = ["--layers", str(layers), "--width", str(width), "--steps", str(steps)]
    command = [sys.executable, "-m", "tools.bench", "memory", "--one", way, *sizes]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def document(rows: Sequence[dict[str, Any]], name: str, versions: str) -> Iterator[str]:
    first = rows[0]
    where = "torch.cuda.max_memory_allocated" if first["device"] == "cuda" else "largest resident set"
    yield f"# Peak memory of training steps: {name}\n"
    yield f"{first['parameters']:,} parameters; {where}, above that before the model was made; {versions}.\n"
    cells = [[WAYS[r["way"]], *(f"{r[key]:.2f}" for key in ("per_parameter", "first", "counted"))] for r in rows]
    yield from table(("bytes per parameter", "peak of a step", "of the first step", "counted"), cells)
    yield "\n*Counted*: weights, states, and gradients where they wait for the step.  The rest is the gradients of one"
    yield "layer and some tens of megabytes whatever the model, for temporaries and buffers of libraries; in the first"
    yield "step also what it takes to make the states.  Written by `python -m tools.bench memory`."


def main(given: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    parser.add_argument("--name", default="", help="memory-NAME.json and .md; none: cpu or cuda")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.one:
        end_with_parent()
        say(json.dumps(measure(options.one, options.layers, options.width, options.steps)))
        return 0
    rows = []
    for way in options.ways:
        rows.append(run(way, options.layers, options.width, options.steps))
        peaks = f"{rows[-1]['per_parameter']:6.2f} bytes per parameter, {rows[-1]['first']:6.2f} in the first step"
        say(f"{WAYS[way]:<60} {peaks} ({rows[-1]['counted']:.2f} counted)")
    name = options.name or rows[0]["device"]
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()
    save(options.out / f"memory-{name}.json", {"machine": machine, "torch": torch.__version__, "rows": rows})
    text = "\n".join(document(rows, machine, f"torch {torch.__version__}"))
    write(options.out / f"memory-{name}.md", text + "\n")
    return 0
