"""Optimizer states and gradient streams to measure storage formats with: two small models, trained on the spot.

The demo's language model (bytes of the Python standard library) and a small convolutional network (images made of
random smooth patterns), each trained by torch's AdamW in fp32.  Kept are the moments of every tensor, early, in the
middle and late, and of some rows of every tensor the gradient of every step.  The seeds are fixed: the same torch on
the same machine gives the same numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model import LanguageModel, Size, batches, corpus, loss_of, rate

ALIGNED = 256
"""Tensors begin at multiples of it in the flat layout: no block of any format, nor of a peer, holds two of them."""

ROWS = 2048
"""Elements of a larger tensor whose gradients are kept: whole rows, evenly spaced."""

WHOLE = 4096
"""Tensors of up to so many elements are kept whole."""

BETAS, CLIP = (0.9, 0.999), 1.0


@dataclass(frozen=True)
class Part:
    """A tensor in a flat layout: elements start .. start + numel."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """The view (..., *shape) of a tensor (..., all elements)."""
        return flat[..., self.start : self.start + self.numel].view(*flat.shape[:-1], *self.shape)


def laid_out(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[Part, ...], int]:
    """Return parts at aligned places, and the number of all elements."""
    parts, end = [], 0
    for name, shape in shapes:
        parts.append(Part(name, shape, end))
        end += -(-math.prod(shape) // ALIGNED) * ALIGNED
    return tuple(parts), end


@dataclass(frozen=True)
class States:
    """Adam's moments after some step: flat, fp32, 0 between tensors."""

    step: int
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Data:
    """The states and gradients of two models.

    parts    the tensors of `states`, all of both models
    rows     the tensors of `gradients`, (steps, elements): some rows of each
    """

    parts: tuple[Part, ...]
    states: tuple[States, ...]
    rows: tuple[Part, ...]
    gradients: Tensor

    def save(self, path: Path) -> None:
        torch.save(self.__dict__, path)

    @staticmethod
    def load(path: Path) -> Data:
        with torch.serialization.safe_globals([Data, Part, States]):
            return Data(**torch.load(path, mmap=True))


class ConvNet(nn.Module):
    """(batch, 3, 16, 16) -> (batch, 10); biases before batch norms have gradients that are rounding noise alone."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(64 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = F.relu(norm(convolution(x)))
            x = F.max_pool2d(x, 2) if i < 2 else F.adaptive_avg_pool2d(x, 2)
        out: Tensor = self.head(x.flatten(1))
        return out


def images(steps: int, seed: int, batch: int = 24) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images of ten smooth random patterns, shifted at random, in noise."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(10, 3, 5, 5, generator=random)
    patterns = F.interpolate(coarse, size=(16, 16), mode="bilinear", align_corners=True)
    for _ in range(steps):
        label = torch.randint(10, (batch,), generator=random)
        shift = torch.randint(-4, 5, (2,), generator=random)
        picture = patterns[label].roll((int(shift[0]), int(shift[1])), (2, 3))
        yield picture + 1.5 * torch.randn(picture.shape, generator=random), label


def chosen_rows(shape: tuple[int, ...]) -> Tensor | None:
    """Return the rows (dimension 0) of a tensor that are kept; None for all."""
    numel = math.prod(shape)
    if len(shape) < 2 or numel <= WHOLE:
        return None
    count = max(1, ROWS * shape[0] // numel)
    return torch.linspace(0, shape[0] - 1, count).round().long()


def _train(
    model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], data: Iterator[tuple[Tensor, Tensor]],
    steps: int, peak: float, dumps: Sequence[int],
) -> tuple[dict[str, Tensor], list[dict[str, tuple[Tensor, Tensor]]]]:  # fmt: skip
    """Return (name -> gradients (steps, *kept shape), per dump name -> (first, second moment))."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=BETAS, weight_decay=0.1)
    named = dict(model.named_parameters())
    picked = {name: chosen_rows(tuple(p.shape)) for name, p in named.items()}
    kept: dict[str, Tensor] = {}
    states = []
    for step, (x, y) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        optimizer.zero_grad()
        loss(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for name, p in named.items():
            assert p.grad is not None
            rows = picked[name]
            g = p.grad if rows is None else p.grad[rows]
            if step == 0:
                kept[name] = torch.empty(steps, *g.shape)
            kept[name][step] = g
        optimizer.step()
        if step + 1 in dumps:
            of = optimizer.state
            states.append({n: (of[p]["exp_avg"].clone(), of[p]["exp_avg_sq"].clone()) for n, p in named.items()})
    return kept, states


def collect(steps: int = 2000, seed: int = 0) -> Data:
    """Train both models; keep the states after a hundredth, a tenth and a half of the steps, and at the end."""
    dumps = sorted({max(1, steps // 100), max(1, steps // 10), steps // 2, steps})
    size = Size()
    torch.manual_seed(seed)
    language = LanguageModel(size)
    found = [_train(language, loss_of, batches(corpus().train, size, steps, seed), steps, 1.5e-3, dumps)]
    torch.manual_seed(seed)
    network = ConvNet()
    found.append(_train(network, lambda m, x, y: F.cross_entropy(m(x), y), images(steps, seed), steps, 2e-3, dumps))
    models = ("language model", "convnet")
    first = {f"{m}: {n}": v for m, (_, states) in zip(models, found, strict=True) for n, v in states[0].items()}
    parts, end = laid_out([(n, tuple(v[0].shape)) for n, v in first.items()])
    states = []
    for i, step in enumerate(dumps):
        flat = torch.zeros(2, end)
        both = {f"{m}: {n}": v for m, (_, s) in zip(models, found, strict=True) for n, v in s[i].items()}
        for part in parts:
            part.of(flat)[0], part.of(flat)[1] = both[part.name]
        states.append(States(step, flat[0], flat[1]))
    grads = {f"{m}: {n}": g for m, (kept, _) in zip(models, found, strict=True) for n, g in kept.items()}
    rows, end = laid_out([(n, tuple(g.shape[1:])) for n, g in grads.items()])
    flat = torch.zeros(steps, end)
    for part in rows:
        part.of(flat).copy_(grads.pop(part.name))
    return Data(parts, tuple(states), rows, flat)
