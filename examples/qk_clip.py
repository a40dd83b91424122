"""QK-clip: attention logits stay below a bound, for queries and keys are scaled after a step that has passed it.

    python examples/qk_clip.py --steps 120
    python examples/qk_clip.py --steps 120 --no-clip        logits grow to many times the bound

Muon's steps have full rank, and queries and keys may grow together until softmax is one-hot.  Kimi K2
(arXiv:2507.20534) takes the largest logit of each head in the passes of a step, and where it is above tau it multiplies
the head's query and key rows by the root of tau / largest.  `opt.scale_rows` does so with all that a plan keeps of a
weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import optgen


class QKClip(TorchFunctionMode):
    """The largest logits of attention layers, and the clip that follows from them.

        clip = QKClip(opt, tau=100.0)
        clip.layer(block.attention, block.attention.q_proj, block.attention.k_proj)      each layer
        with clip:
            loss = model(x)                                          # F.scaled_dot_product_attention is seen
        ...
        opt.step()
        clip.step()

    FlexAttention gives the maxima itself, on GPUs: call `clip.record(layer, aux.max_scores)`, without `with`.
    """

    def __init__(self, optimizer: Any, tau: float) -> None:
        super().__init__()
        self.optimizer, self.tau = optimizer, tau
        self.projections: dict[nn.Module, tuple[list[nn.Linear], int]] = {}
        self.largest: dict[nn.Module, Tensor] = {}
        self.inside: list[nn.Module] = []

    def layer(self, module: nn.Module, *projections: nn.Linear, fused: int = 0) -> None:
        """Add a layer of attention: its queries' and keys' projections, or the one of both.

        fused  the heads of values behind them in the rows of that one
        """
        self.projections[module] = [*projections], fused
        module.register_forward_pre_hook(lambda *_: self.inside.append(module))
        module.register_forward_hook(lambda *_: self.inside.remove(module), always_call=True)

    def record(self, module: nn.Module, scores: Tensor) -> None:
        """Take in logits, or their maxima, of (batch, heads, ...): also of micro-batches, and of passes done again."""
        found = scores.detach().float().transpose(0, 1).flatten(1).amax(1)
        known = self.largest.get(module)
        self.largest[module] = found if known is None else torch.maximum(known, found)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.inside and self.inside[-1] in self.projections:
            with torch.no_grad():
                self.record(self.inside[-1], logits(*args, **kwargs))
        return func(*args, **kwargs)

    def step(self) -> float:
        """Scale the rows of heads whose logits have passed tau, and return the largest logit, over all ranks."""
        if not self.largest:
            raise RuntimeError("QKClip.step: no logits: run the model inside of `with clip`, or call clip.record()")
        together = torch.cat([*self.largest.values()])
        if dist.is_initialized():
            dist.all_reduce(together, dist.ReduceOp.MAX)
        for module, largest in zip(self.largest, together.split([len(x) for x in self.largest.values()]), strict=True):
            self._scale(*self.projections[module], (self.tau / largest.clamp(min=self.tau)).to(largest))
        self.largest.clear()
        return float(together.max())

    def _scale(self, projections: list[nn.Linear], fused: int, factors: Tensor) -> None:
        """Multiply logits of each head by its factor: keys that several heads share by the root of the least."""
        key_rows = projections[-1].weight.shape[0]
        size = projections[0].weight.shape[0] // (len(factors) + 2 * fused if fused else len(factors))
        shared = len(factors) // (fused or key_rows // size)  # query heads of a key head
        keys = factors.view(-1, shared).amin(1).sqrt()
        queries = factors / keys.repeat_interleave(shared)
        scales = [torch.cat((queries, keys, torch.ones_like(keys)))] if fused else [queries, keys]
        for projection, by in zip(projections, scales, strict=True):
            for p in projection.parameters(recurse=False):  # the bias, too
                if bool((by != 1).any()):
                    self.optimizer.scale_rows(p, by)


def logits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False,
           scale: float | None = None, enable_gqa: bool = False, **other: Any) -> Tensor:  # fmt: skip
    """Return the logits of F.scaled_dot_product_attention, -inf where a query does not look."""
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    found = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = other.get("attn_mask", mask)
    if is_causal:
        mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    if mask is None:
        return found
    return found.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else found + mask


class Attention(nn.Module):
    """Attention of several query heads for each key head."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n * self.size) for n in (heads, key_heads, key_heads))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return found


class Network(nn.Module):
    """A model that is to say how a text goes on that has begun anew."""

    def __init__(self, tokens: int = 16, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(Attention(width, 4, 2) for _ in range(2))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            h = h + layer(F.rms_norm(h, h.shape[-1:]))
        found: Tensor = self.head(h)
        return found


def run(steps: int, clipped: bool, tau: float = 30.0, plan: str = "int8_split24") -> tuple[list[float], list[float]]:
    """Train with and without the clip; return the largest logit and the loss of each step."""
    torch.manual_seed(0)
    model = Network()
    opt = optgen.make("muon", model, lr=0.1, weight_decay=0.0, plan=plan)
    clip = QKClip(opt, tau if clipped else 1e30)
    for layer in model.modules():
        if isinstance(layer, Attention):
            clip.layer(layer, layer.q_proj, layer.k_proj)
    largest, losses = [], []
    for step in range(steps):
        x = torch.randint(16, (32, 12), generator=torch.Generator().manual_seed(step)).repeat(1, 2)
        with clip:
            loss = F.cross_entropy(model(x)[:, 12:-1].flatten(0, 1), x[:, 13:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        largest.append(clip.step())
        losses.append(loss.item())
    return largest, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--no-clip", action="store_true")
    given = parser.parse_args()
    largest, losses = run(given.steps, not given.no_clip)
    print(f"largest logit of the last 20 steps {max(largest[-20:]):.1f}, loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
