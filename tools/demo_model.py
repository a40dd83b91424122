"""A small byte-level language model, its text, and one training run: what the demo trains.

The text is the source code of the Python standard library on the running machine; the split is by whole 4 KiB pieces,
every 16th for validation, so that it depends on nothing but the text.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PIECE = 4096
MAX_BYTES = 8 << 20


@dataclass(frozen=True)
class Size:
    """The model and its batches."""

    layers: int = 3
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 16
    vocabulary: int = 256


class Linear(nn.Linear):
    """Multiplies in float32 whatever its weights are stored in: few CPUs have fast bf16 units.

    The gradient reaches the weight in the weight's dtype, as it does on a GPU.
    """

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = F.linear(input, self.weight.float())
        return product


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.float(), eps=1e-6)


class Block(nn.Module):
    """Pre-norm: attention, then a two-layer perceptron, each added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = Norm(size.width)
        self.qkv = Linear(size.width, 3 * size.width, bias=False)
        self.out = Linear(size.width, size.width, bias=False)
        self.norm_mlp = Norm(size.width)
        self.up = Linear(size.width, 4 * size.width, bias=False)
        self.down = Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        split = (batch, time_, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(split).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


class LanguageModel(nn.Module):
    """(batch, time) byte values -> (batch, time, 256) logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = Linear(size.width, size.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if deep else 1))

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x).float() + self.positions(where).float()
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8
    validation: Tensor
    files: int
    digest: str


def corpus() -> Corpus:
    """The standard library's own modules (no third-party packages, no tests), in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    chunks: list[bytes] = []
    total = 0
    paths = sorted((p.relative_to(root) for p in root.rglob("*.py")), key=lambda p: p.as_posix())
    paths = [p for p in paths if not skip.intersection(p.parts)]
    for path in paths:
        chunks.append((root / path).read_bytes())
        total += len(chunks[-1])
        if total >= MAX_BYTES:
            break
    raw = b"".join(chunks)[:MAX_BYTES]
    if len(raw) < 1 << 20:
        raise SystemExit(f"the demo's text is the standard library's source; {root} has only {len(raw)} bytes of it")
    return Corpus(*split(raw), len(chunks), hashlib.sha256(raw).hexdigest()[:12])


def split(raw: bytes) -> tuple[Tensor, Tensor]:
    """Return a text's bytes to train on, and its held-out ones."""
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    pieces = data[: len(data) // PIECE * PIECE].view(-1, PIECE)
    held_out = torch.arange(len(pieces)) % 16 == 15
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def batches(data: Tensor, size: Size, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `steps` random batches of (input, next byte), the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    offsets = torch.arange(size.context + 1)
    for _ in range(steps):
        starts = torch.randint(len(data) - size.context, (size.batch, 1), generator=random)
        window = data[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Tensor, size: Size, count: int) -> float:
    """Return the loss over `count` batches, the same in every run."""
    model.eval()
    losses = [float(loss_of(model, x, y)) for x, y in batches(data, size, count, seed=12345)]
    model.train()
    return sum(losses) / len(losses)


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warm-up over a twentieth of the run, then a cosine to a tenth of the peak."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    along = (step - warm) / max(1, steps - warm)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))


def stored_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Count (bytes of the weights, bytes of the optimizer's tensors)."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = 0
    for slots in optimizer.state.values():
        state += sum(t.numel() * t.element_size() for t in slots.values() if isinstance(t, Tensor) and t.ndim > 0)
    return weights, state


@dataclass
class Run:
    """The result of one run."""

    validation: list[tuple[int, float]]  # (step, nats per byte)
    weight_bytes: int
    state_bytes: int
    parameters: int
    step_ms: float  # median time of a whole step
    optimizer_ms: float  # median time of optimizer.step()

    @property
    def final(self) -> float:
        return self.validation[-1][1]


def train(
    text: Corpus,
    size: Size,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    dtype: torch.dtype,
    steps: int,
    seed: int,
    peak: float | None = None,
    checks: int = 8,
    report: Callable[[int, float], None] = lambda step, loss: None,
    between: Callable[..., Any] = lambda model, optimizer, step, x, y: None,
) -> Run:
    """One run: the model's start, the batches and their order depend on the seed alone.

    peak     the largest learning rate; None: the optimizer's own rates, where they are named like one, are the largest
    between  is called between backward and step; what it returns is called in the place of `optimizer.step`
    """
    torch.manual_seed(seed)
    model = LanguageModel(size).to(dtype)
    optimizer = make(model)
    groups = optimizer.param_groups
    rates = [peak or group["lr"] for group in groups]
    averages = getattr(optimizer, "evaluation", None) is not None
    if "warmup_steps" in groups[0]:
        rates = []  # an average of the weights takes the place of a schedule
    every = max(1, steps // checks)
    curve: list[tuple[int, float]] = []
    whole: list[float] = []
    inside: list[float] = []
    for step, (x, y) in enumerate(batches(text.train, size, steps, seed)):
        begin = time.perf_counter()
        for group, largest in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate(step, steps, largest)
        loss = loss_of(model, x, y)
        loss.backward()
        before = time.perf_counter()
        (between(model, optimizer, step, x, y) or optimizer.step)()
        after = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        inside.append(after - before)
        whole.append(time.perf_counter() - begin)
        report(step + 1, float(loss.detach()))
        if (step + 1) % every == 0 or step + 1 == steps:
            last = step + 1 == steps
            if averages:
                optimizer.eval()
            curve.append((step + 1, validate(model, text.validation, size, 48 if last else 8)))
            if averages:
                optimizer.train()
    weights, state = stored_bytes(model, optimizer)
    return Run(
        validation=curve,
        weight_bytes=weights,
        state_bytes=state,
        parameters=sum(p.numel() for p in model.parameters()),
        step_ms=1e3 * sorted(whole)[len(whole) // 2],
        optimizer_ms=1e3 * sorted(inside)[len(inside) // 2],
    )
