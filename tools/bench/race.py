"""The shared parts of benchmarks: the machine, the contenders, rounds in which they take turns, and reports.

Contenders stand in memory beside each other and take turns, in a random order in every round. A ratio is the median of
the rounds' own ratios: what slows a whole round down is in both of its times.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from optgen import optim
from optgen.driver.project import DEFAULT_PLANS
from tools.prose import table

BASE, FLAGSHIP, COPY = "torch AdamW fused fp32", "AdamW int8_split24", "copy"
BF16, FP32 = torch.bfloat16, torch.float32
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
AGAIN = {"CAME": (1, 0, 2), "Adafactor": (0, 1, 2), "LAMB": (1, 1, 0)}
"""Rules of several sweeps -> how many times more they read (states, weight, gradient) than one sweep does."""
OF_MATRICES = ("Muon", "SOAP")
"""Rules that multiply matrices, whose time is not that of memory; their step takes matrices alone here."""
SHARE, FEWEST = 15.0, 3
"""Seconds that one contender may take of a section, and rounds in which the slowest takes part."""
NO_TIME = "no time left"

Shapes = list[tuple[int, ...]]
Section = dict[str, Any]


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257, context: int = 1024) -> Shapes:
    """Return the shapes of GPT-2 (Radford et al. 2019), the 124M model with tied embeddings.

    >>> len(gpt2()), sum(map(math.prod, gpt2()))
    (148, 124439808)
    """
    w, h = width, 4 * width
    layer: Shapes = [(w,), (w,), (w, 3 * w), (3 * w,), (w, w), (w,), (w,), (w,), (w, h), (h,), (h, w), (w,)]
    return [(vocabulary, w), (context, w), *(layer * layers), (w,), (w,)]


def llama_8b(width: int = 4096, layers: int = 32, hidden: int = 14336, keys: int = 1024, words: int = 128256) -> Shapes:
    """Return the shapes of Llama 3.1 8B (Grattafiori et al. 2024).

    >>> len(llama_8b()), sum(map(math.prod, llama_8b()))
    (291, 8030261248)
    """
    w, h, k = width, hidden, keys
    layer: Shapes = [(w, w), (k, w), (k, w), (w, w), (h, w), (h, w), (w, h), (w,), (w,)]
    return [(words, w), *(layer * layers), (w,), (words, w)]


# The machine ----------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Describe the machine as far as a reader of the figures has to know it, without anything that names it."""
    from optgen.runtime.cpu import native

    compiler = native.compiler()
    packages = ("triton", "deepspeed", "torchao", "bitsandbytes", "flashoptim")
    found: dict[str, Any] = {
        "device": cpu_model(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "packages": {name: version for name in packages if (version := installed(name))},
        "cores": cores(),
        "compiler": scrub(compiler.version) if compiler else None,
        "code_path": native.isa().name,
        "vectors": sorted(native.cpu_flags() & {"avx2", "avx512f", "fma"}),
        "load": round(os.getloadavg()[0], 2),
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        found |= {"device": gpu.name, "memory_gib": round(gpu.total_memory / 2**30), "cuda": torch.version.cuda}
    return found


def cpu_model() -> str:
    """Return the processor's name, with its numbers where a virtual machine hides which one of its line it is."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    known = dict(re.findall(r"^([\w ]+?)\s*:\s*(.+)$", text, re.MULTILINE))
    name = known.get("model name") or platform.processor() or platform.machine()
    hidden = not re.search(r"\d", name) and "model" in known
    return f"{name} (family {known.get('cpu family')}, model {known['model']})" if hidden else name


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def slug(text: str) -> str:
    """Return a name for files.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def scrub(text: str) -> str:
    """Leave the folders of paths out.

    >>> scrub("cannot open /home/somebody/cache/kernel.so: no such file")
    'cannot open kernel.so: no such file'
    """
    start = r"(?:(?<=-[IL])|(?<![\w/.:]))(?:~|[A-Za-z]:)?"
    return re.sub(start + r"(?:[\\/][\w.+@~-]+)*[\\/](?=[\w.+@~-])", "", text)


# Contenders -----------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """One way to step a list of parameters.

    make    build the optimizer, or raise where it cannot be had
    within  context in which it is built and stepped
    again   how many times more it reads (states, weight, gradient) than one sweep does; None: it multiplies matrices
    weight  bytes of a weight, with those that a plan adds to it
    kept    bytes per element of weights and states, counted when it is first built
    """

    name: str
    dtype: torch.dtype
    make: Callable[[Sequence[torch.nn.Parameter]], Any]
    ours: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    again: tuple[int, int, int] | None = (0, 0, 0)
    weight: float = 4.0
    kept: float = math.nan

    @property
    def moved(self) -> float | None:
        """Bytes per element that a step has to move: weights and states read and written, gradients read."""
        if self.again is None:
            return None
        further = zip(self.again, (self.kept - self.weight, self.weight, self.dtype.itemsize), strict=True)
        return 2 * self.kept + self.dtype.itemsize + sum(times * size for times, size in further)

    def build(self, gradients: Sequence[Tensor]) -> Any:
        params = [torch.nn.Parameter(torch.randn_like(g).mul_(0.02)) for g in gradients]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        return self.make(params)

    def count(self, device: str) -> None:
        """Count `kept` on the tensors that are there after a step; libraries keep small tensors otherwise."""
        g = torch.zeros(2**7, 2**7, dtype=self.dtype, device=device)
        with self.within():
            optimizer = self.build([g])
            optimizer.step()
        (p,) = optimizer.param_groups[0]["params"]
        kept = [x for name, value in optimizer.state[p].items() if name != "step" for x in _plain(value)]
        unique = {x.data_ptr(): x.nbytes for x in [p.detach(), *kept] if x.numel() > 1}
        self.kept = sum(unique.values()) / g.numel()


def _plain(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a state is made of, where a library wraps codes and scales into one."""
    if hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, part))
    elif isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dict__"):  # FlashOptim's pairs of codes and scales
        for part in vars(value).values():
            yield from _plain(part)


@contextmanager
def code_path(isa: str) -> Iterator[None]:
    """Compile and load kernels for an instruction set within."""
    with patch.dict(os.environ, OPTGEN_ISA=isa):
        yield


def generated(backend: str) -> list[Contender]:
    """Return optgen's AdamW, Lion and rules of several sweeps; on CPUs AdamW's other code paths.

    On GPUs also SGD, rules of matrices, and AdamW and CAME with released gradients.
    """

    def ours(cls: str, plan: str, hypers: dict[str, Any], isa: str = "") -> Contender:
        made, fp32 = getattr(optim, cls), plan == "fp32"
        within = (lambda: code_path(isa)) if isa else nullcontext
        name = f"{cls} {plan}" + f", {isa}" * bool(isa)
        again = None if cls in OF_MATRICES else AGAIN.get(cls, (0, 0, 0))
        make = lambda p: made(p, plan=plan, backend=backend, **hypers)  # noqa: E731
        return Contender(name, FP32 if fp32 else BF16, make, True, within, again, 4.0 if fp32 else 3.0)

    on_gpu = backend == "triton"
    rules: list[tuple[str, dict[str, Any]]] = [("AdamW", ADAMW), ("Lion", LION), *[("SGD", SGD)] * on_gpu]
    rules += [(cls, {}) for cls in (*AGAIN, *OF_MATRICES * on_gpu)]
    plans = [*DEFAULT_PLANS[::-1], "int4_split24"]
    found = [ours(cls, plan, hypers) for cls, hypers in rules for plan in plans]
    found += [ours("AdamW", plan, ADAMW) for plan in ("int8_rn_split24", *["flashoptim"] * on_gpu)]
    found += [ours("AdamW", "int8_split24", ADAMW, isa) for isa in ("avx2", "portable") if not on_gpu]
    for c in [c for c in found if on_gpu and c.name in (FLAGSHIP, "CAME int8_split24")]:
        found.append(replace(c, name=f"{c.name}, released", make=lambda p, c=c: Released(c.make(p), p)))
    return found


def in_groups(contender: Contender) -> Contender:
    """Return a contender that has each tensor in a group of its own, with a rate of its own."""

    def make(params: Sequence[torch.nn.Parameter]) -> Any:
        groups: Any = [{"params": [p], "lr": 1e-3 * (1 + k / len(params))} for k, p in enumerate(params)]
        return contender.make(groups)

    return replace(contender, name=f"{contender.name}, a group for each tensor", make=make)


class Released:
    """An optimizer whose gradients are released: `step` is a backward pass that does nothing but hand them over."""

    def __init__(self, optimizer: Any, params: Sequence[torch.nn.Parameter]) -> None:
        self.optimizer, self.params = optimizer, params
        self.grads = [p.grad for p in params]
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        for p in params:
            p.grad = None
        optimizer.release_gradients()

    def step(self) -> None:
        _HandOver.apply(self.grads, *self.params).backward()  # type: ignore[no-untyped-call]


class _HandOver(torch.autograd.Function):
    """A loss with given gradients, which torch takes as they are."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def backward(ctx: Any, loss: Tensor) -> Any:
        return None, *(g.detach() for g in ctx.grads)


TORCH = (
    (BASE, FP32, torch.optim.AdamW, {"fused": True, **ADAMW}),
    ("torch AdamW fused bf16", BF16, torch.optim.AdamW, {"fused": True, **ADAMW}),
    ("torch AdamW foreach fp32", FP32, torch.optim.AdamW, {"foreach": True, **ADAMW}),
    ("torch SGD momentum fused fp32", FP32, torch.optim.SGD, {"fused": True, **SGD}),
)
PEERS = (
    ("cpu", "DeepSpeedCPUAdam fp32", FP32, "deepspeed.ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True, **ADAMW}),
    ("cpu", "torchao AdamW8bit fp32", FP32, "torchao.optim", "AdamW8bit", ADAMW),
    ("cpu", "torchao AdamW4bit fp32", FP32, "torchao.optim", "AdamW4bit", ADAMW),
    ("cpu", "torchao AdamWFp8 fp32", FP32, "torchao.optim", "AdamWFp8", ADAMW),
    ("cpu", "bitsandbytes AdamW8bit fp32", FP32, "bitsandbytes.optim", "AdamW8bit", ADAMW),
    ("cuda", "torch Muon bf16", BF16, "torch.optim", "Muon", {}),
    ("cuda", "FlashAdamW", BF16, "flashoptim", "FlashAdamW", ADAMW),
    ("cuda", "FlashLion", BF16, "flashoptim", "FlashLion", LION),
    ("cuda", "FlashSGD", BF16, "flashoptim", "FlashSGD", SGD),
    ("cuda", "bitsandbytes AdamW8bit", BF16, "bitsandbytes.optim", "AdamW8bit", ADAMW),
    ("cuda", "bitsandbytes Lion8bit", BF16, "bitsandbytes.optim", "Lion8bit", LION),
)


def torch_s_own() -> list[Contender]:
    return [Contender(name, dtype, lambda p, cls=cls, h=h: cls(p, **h)) for name, dtype, cls, h in TORCH]  # type: ignore[misc]


def peers(device: str) -> tuple[list[Contender], dict[str, str]]:
    """Return (contenders that can be imported here, name -> why not for the rest)."""
    # Extensions that are compiled when first used look for `ninja` on the path; it is installed beside Python.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    found, missing = [], {}
    for kind, name, dtype, module, cls, hypers in PEERS:
        if kind != device:
            continue
        try:
            made = getattr(imported := importlib.import_module(module), cls)
            for kernel in ("_triton_quantize_kernel", "_triton_dequantize_kernel") * (module == "flashoptim"):
                tuned = getattr(getattr(imported, "optimizers", None), kernel, None)
                if tuned is not None:  # kernels that no step launches, and whose tuning takes half a minute
                    tuned.configs = tuned.configs[:1]
        except Exception as error:  # a broken installation says so in many ways
            missing[name] = "not installed" if isinstance(error, ModuleNotFoundError) else in_words(error)
        else:
            found.append(Contender(name, dtype, lambda p, make=made, h=hypers: make(p, **h)))  # type: ignore[misc]
    return found, missing


def in_words(error: BaseException) -> str:
    return scrub(f"{type(error).__name__}: {str(error).strip()[:300]}")


# A section: contenders over one list of tensors -----------------------------------------------------------------------


@dataclass
class Lane:
    """A contender in memory: the seconds per step of each round in which it took part."""

    contender: Contender
    timer: Timer
    rounds: int
    seconds: dict[int, float] = field(default_factory=dict)


def batches(found: Sequence[Contender], numel: int, memory: float) -> tuple[list[list[Contender]], list[Contender]]:
    """Return (batches that fit into memory, contenders that fit in none); what all are compared with is in each."""

    def size(chosen: Sequence[Contender]) -> float:
        return numel * (sum(c.kept for c in chosen) + sum(dtype.itemsize for dtype in {c.dtype for c in chosen}))

    first = [c for c in found if c.name in (BASE, FLAGSHIP) and size([c]) <= memory]
    first = first if size(first) <= memory else first[:1]
    out, left_out = [list(first)], []
    for one in (c for c in found if c not in first):
        if size([*first, one]) > memory:
            left_out.append(one)
        elif size([*out[-1], one]) <= memory:
            out[-1].append(one)
        else:
            out.append([*first, one])
    return out, left_out


def free_memory(device: str) -> float:
    """Return the bytes that contenders may take; the rest is for temporaries."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        return 0.9 * torch.cuda.mem_get_info()[0]
    found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    return 0.6 * 1024 * int(found[1]) if found else 2.0**32


def section(
    title: str, shapes: Shapes, contenders: Sequence[Contender], *, device: str = "cpu", threads: int = 1,
    rounds: int = 10, steps: int = 1, copied: int = 2**28, memory: float | None = None, end: float = math.inf,
    share: float = SHARE, say: Callable[[str], None] = lambda text: None,
    keep: Callable[[Section], None] = lambda found: None,
) -> Section:  # fmt: skip
    """Time all contenders over one list of tensors.

    steps   in a row within a turn
    copied  bytes of the buffer whose copying is timed beside them; 0: it is not
    end     of time.monotonic(); no batch and no round is begun after it
    share   seconds that one contender may take
    keep    is given what was found after each batch
    """
    began, numel = time.monotonic(), sum(map(math.prod, shapes))
    left_out: dict[str, str] = {}
    fitting = []
    for c in contenders:
        try:
            if math.isnan(c.kept):
                c.count(device)
            fitting.append(c)
        except Exception as error:  # the contender's failure is a result, not the end of the run
            left_out[c.name] = in_words(error)
    order = [c.name for c in contenders]

    def found() -> Section:
        return {
            "title": title, "device": device, "tensors": len(shapes), "elements": numel, "threads": threads,
            "rounds": rounds, "rows": sorted(rows.values(), key=lambda r: order.index(r["name"])),
            "left_out": dict(left_out), "seconds": round(time.monotonic() - began, 1),
        }  # fmt: skip

    runs, unfit = batches(fitting, numel, (free_memory(device) if memory is None else memory) - 2 * copied)
    left_out |= {c.name: "does not fit into memory" for c in unfit}
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        if time.monotonic() >= end:
            left_out |= {c.name: NO_TIME for c in run if c.name not in rows}
            continue
        lanes = _race(shapes, run, device, threads, rounds, steps, copied, left_out, end, share)
        for name in lanes:
            if name != COPY and name not in rows and lanes[name].seconds:
                rows[name] = _row(name, lanes, numel, copied)
        say(f"{title}: {', '.join(name for name in lanes if name != COPY)}")
        keep(found())
    return found()


def _race(
    shapes: Shapes, run: Sequence[Contender], device: str, threads: int, rounds: int, steps: int, copied: int,
    left_out: dict[str, str], end: float, share: float,
) -> dict[str, Lane]:  # fmt: skip
    """Return the lanes of those that ran, and of copying; say of the rest why not."""
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_(0, 256)  # caches of some devices compress
    target = torch.empty_like(source)
    grads = {t: [torch.randn(s, device=device, dtype=t).mul_(1e-3) for s in shapes] for t in {c.dtype for c in run}}
    lanes: dict[str, Lane] = {}
    copy = Contender(COPY, FP32, lambda params: None)
    for c in [copy] * bool(copied) + [*run]:
        try:
            with c.within():
                step = (lambda: target.copy_(source)) if c is copy else c.build(grads[c.dtype]).step
                timer = Timer("step()", globals={"step": step}, num_threads=threads)
                turn = (steps + 2) * min(timer.timeit(1).median for _ in range(2))  # each turn warms up for two steps
            lanes[c.name] = Lane(c, timer, max(min(rounds, FEWEST), min(rounds, int(share / turn))))
        except Exception as error:
            left_out[c.name] = in_words(error)
    order, shuffled = list(lanes), random.Random(0)
    for number in range(rounds):
        if number and time.monotonic() >= end:
            break
        shuffled.shuffle(order)
        for name in order:
            lane = lanes.get(name)
            # The rounds of the slow lie evenly among all.
            if lane is None or (number + 1) * lane.rounds // rounds == number * lane.rounds // rounds:
                continue
            try:
                with lane.contender.within():
                    lane.seconds[number] = lane.timer.timeit(steps if name != COPY else 1).median
            except Exception as error:
                left_out[name] = in_words(error)
                del lanes[name]
    return lanes


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles, in as many digits as a run repeats.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    {'median': 3.0, 'q1': 2.0, 'q3': 4.0, 'n': 5}
    """
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {name: float(f"{x:.4g}") for name, x in (("median", median), ("q1", q1), ("q3", q3))} | {"n": len(values)}


def _row(name: str, lanes: Mapping[str, Lane], numel: int, copied: int) -> dict[str, Any]:
    """Return what is reported of a contender; ratios are above 1 where it is the faster one."""
    own = lanes[name]
    c = own.contender

    def ratio(other: str, scale: float = 1.0) -> dict[str, float] | None:
        both = [n for n in own.seconds if n in lanes[other].seconds] if other in lanes and other != name else []
        return summary([scale * lanes[other].seconds[n] / own.seconds[n] for n in both]) if both else None

    return {
        "name": name, "ours": c.ours, "kept": round(c.kept, 4), "moved": c.moved and round(c.moved, 4),
        "us": summary([1e6 * s for s in own.seconds.values()]),
        "ns_per_parameter": summary([1e9 * s / numel for s in own.seconds.values()]),
        "speed": ratio(BASE), "of_copy": c.moved and ratio(COPY, c.moved * numel / max(2 * copied, 1)),
        "versus": {o: ratio(o) for o, lane in lanes.items() if c.ours and not lane.contender.ours and o != COPY},
    }  # fmt: skip


# A race: calls that take turns ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """Calls that take turns, and how they are reported.

    runs     name -> call; the first one is what the others are compared with
    scale    a unit, and how many of it a second of a call is: ("ms", 1e3)
    before   what is done before what is timed, given the name
    least    seconds that are timed at a time, which has as many calls as take that long; 0: one call
    row      times in a row of a turn: the later ones find in the caches what the first has left
    missing  name -> why it does not take part
    """

    title: str
    runs: Mapping[str, Callable[[], object]]
    scale: tuple[str, float] = ("ms", 1e3)
    before: Callable[[str], None] = lambda name: None
    least: float = 0.0
    row: int = 1
    missing: Mapping[str, str] = field(default_factory=dict)

    def times(self, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
        """Return the time of a call in each round, in the unit."""
        out: dict[str, list[float]] = {name: [] for name in self.runs}
        calls, order, shuffled = 1, list(self.runs), random.Random(0)
        for number in range(-2, rounds):  # the first two rounds warm up
            shuffled.shuffle(order)
            gc.collect()
            gc.disable()
            for name in (name for name in order for _ in range(self.row)):
                self.before(name)
                run, start = self.runs[name], clock()
                for _ in range(calls):
                    run()
                out[name].append((clock() - start) / calls * self.scale[1])
            gc.enable()
            if number == -1:
                calls = max(1, math.ceil(self.least * self.scale[1] / min(x[-1] for x in out.values())))
        return {name: x[2 * self.row :] for name, x in out.items()}

    def lines(self, rounds: int, clock: Callable[[], float]) -> list[str]:
        """Run it; return its table."""
        found = self.times(rounds, clock)
        base, *others = found
        rows = [[base, digits(statistics.median(found[base])), digits(min(found[base])), "", ""]]
        for name in others:
            x = summary([a / b for a, b in zip(found[name], found[base], strict=True)])
            ratio = [f"{x['median']:.3f}", f"{x['q1']:.3f} to {x['q3']:.3f}"]
            rows.append([name, digits(statistics.median(found[name])), digits(min(found[name])), *ratio])
        rows += [[name, f"not here: {why}", "", "", ""] for name, why in self.missing.items()]
        head = ("", f"{self.scale[0]}, median", "least", f"of {base}", "quartiles")
        return [f"## {self.title}", "", *table(head, rows), ""]


def run_races(
    races: Callable[[argparse.Namespace], Iterator[Race]], parser: argparse.ArgumentParser, given: Sequence[str]
) -> int:
    """Read the command line and run the races; print their tables, and write them to --out."""
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1, help="1: CPU time is measured, which others disturb less")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    asked = parser.parse_args(given)
    torch.set_num_threads(asked.threads)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    packages = ("torch", "triton", "flashoptim", "pytorch-optimizer", "heavyball")
    words = [cpu_model(), f"{cores()} cores", f"load {os.getloadavg()[0]:.1f}", f"{asked.threads} threads"]
    words += [f"{asked.rounds} rounds", *(f"{x} {v}" for x in packages if (v := installed(x)))]
    text = [f"# {parser.description}", "", ", ".join(words) + ".", ""]
    print("\n".join(text), flush=True)
    for race in races(asked):
        text += race.lines(asked.rounds, clock)
        print("\n".join(text[text.index(f"## {race.title}") :]), flush=True)
    if asked.out:
        write(asked.out, "\n".join(text))
    return 0


# Reports --------------------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Write a file at once or not at all: a run may be cut short at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save(path: Path, data: Mapping[str, Any]) -> None:
    write(path, json.dumps(data, indent=1, default=str) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Return an earlier report, {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def digits(value: float) -> str:
    """Return three digits of a number.

    >>> digits(0.5812), digits(34.06), digits(1234.5)
    ('0.581', '34.1', '1234')
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def quartiles(found: Mapping[str, float] | None) -> list[str]:
    """Return the cells of a median and its quartiles."""
    return [digits(found["median"]), f"{digits(found['q1'])} to {digits(found['q3'])}"] if found else ["", ""]


def section_lines(found: Section) -> list[str]:
    """Return a section's table; of a CPU's times, which its neighbours change, only ratios."""
    whole = found["tensors"] > 1
    unit = "us" if whole else "ns_per_parameter"
    head = ["", "B kept", "B moved", "speed", "quartiles", "of copy"]
    timed = found["device"] != "cpu"
    head += ["us per step" if whole else "ns per parameter", "quartiles"] * timed
    rows = [
        [
            r["name"], f"{r['kept']:.4g}", f"{r['moved']:.4g}" if r["moved"] else "", *quartiles(r["speed"]),
            f"{r['of_copy']['median']:.0%}" if r["of_copy"] else "", *quartiles(r[unit]) * timed,
        ]
        for r in found["rows"]
    ]  # fmt: skip
    threads = f", {found['threads']} thread{'s' * (found['threads'] > 1)}" if found["threads"] else ""
    left_out = "; ".join(f"{name} ({why})" for name, why in found["left_out"].items())
    lines = [f"## {found['title']}{threads}", "", *table(head, rows, (0, 4, 7)), ""]
    return lines + ([f"Left out: {left_out}.", ""] if left_out else [])


def markdown(data: Mapping[str, Any]) -> str:
    """Return the report: the machine, what was checked, and a table for each section."""
    machine_ = data["machine"]
    words = [f"{machine_['cores']} cores", f"load {machine_['load']:g} at the start", f"torch {machine_['torch']}"]
    words += [f"{name} {version}" for name, version in machine_["packages"].items()]
    lines = [f"# {machine_['device']}, {machine_['date']}", "", ", ".join(words) + ".", "", *data.get("checks", ())]
    for found in data["sections"].values():
        lines += section_lines(found)
    missing = "; ".join(f"{name} ({why})" for name, why in data["missing"].items())
    return "\n".join([*lines, f"Not compared: {missing}." if missing else ""]).rstrip() + "\n"
