"""Compare frozen shares that are predicted before a run with those of three tasks, trained by torch's AdamW in bf16.

    python -m docs.tools.frozen    trains for two minutes, writes docs/benchmarks/frozen.json, prints a table

A weight counts if it has had a gradient; all are of matrices.  Predictions know the spread of each tensor's first
values, the rate and the betas.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from docs.tools.evidence import Sorter, lists
from optgen.driver.load import find_spec
from optgen.verify.stall import predict
from tools.demo_model import LanguageModel, Size, batches, corpus, loss_of
from tools.prose import table

RECORD = Path(__file__).resolve().parents[1] / "benchmarks/frozen.json"
STEPS, SEED, BF16 = 300, 0, torch.bfloat16
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
Losses = Iterator[Callable[[nn.Module], Tensor]]


def tasks() -> Iterator[tuple[str, nn.Module, Losses]]:
    """Yield each task's name, its model and the losses of its steps."""
    size, (pairs, _) = Size(layers=2), lists(SEED, STEPS)
    torch.manual_seed(SEED)
    text = batches(corpus().train[: 4 << 20], size, STEPS, SEED)
    yield "bytes of Python's library", LanguageModel(size), ((lambda m, b=b: loss_of(m, *b)) for b in text)
    sort = ((lambda m, x=x, y=y: F.cross_entropy(m(x).flatten(0, 1).float(), y.flatten())) for x, y in pairs)
    yield "lists to sort", Sorter(), sort
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).requires_grad_(False)
    points = (torch.randn(64, 64) for _ in range(STEPS))
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    told = ((lambda m, x=x: F.cross_entropy(m(x.to(BF16)).float(), teacher(x).argmax(1))) for x in points)
    yield "another network's classes", net, told


@lru_cache
def predicted(std: float, lr: float) -> float:
    return predict(find_spec("adamw"), BF16, {"lr": lr}, weight_std=std, steps=STEPS)["weights"]


def stalled() -> float:
    """Return the share of second moments that the last of STEPS gradients N(0, 1) leaves as they are."""
    draw, v, before = torch.Generator().manual_seed(SEED), torch.zeros(1 << 14, dtype=BF16), torch.zeros(0)
    for _ in range(STEPS):
        before = v
        v = v.mul(0.999).addcmul(*[torch.randn(v.shape, generator=draw).to(BF16)] * 2, value=0.001)
    return float((v == before).double().mean())


def trained(model: nn.Module, losses: Losses, lr: float) -> dict[str, float]:
    """Return the shares that are predicted, and those that the last step left."""
    model = model.to(BF16)
    params = [p for p in model.parameters() if p.ndim >= 2]
    spreads = [float(f"{float(p.detach().float().square().mean().sqrt()):.2g}") for p in params]
    opt, kept = torch.optim.AdamW(model.parameters(), lr=lr), []
    for loss in losses:
        opt.zero_grad()
        value = loss(model)
        value.backward()
        kept = [(p.detach().clone(), opt.state[p]["exp_avg_sq"].clone()) if opt.state else (p, p) for p in params]
        opt.step()
    moments = [opt.state[p]["exp_avg_sq"] for p in params]
    seen = [v != 0 for v in moments]
    count = sum(float(s.sum()) for s in seen)
    weights = sum(float(((w == p) & s).sum()) for (w, _), p, s in zip(kept, params, seen, strict=True)) / count
    still = sum(float(((old == v) & s).sum()) for (_, old), v, s in zip(kept, moments, seen, strict=True)) / count
    before = sum(predicted(std, lr) * float(s.sum()) for std, s in zip(spreads, seen, strict=True)) / count
    return {"lr": lr, "predicted": before, "weights": weights, "moments": still, "loss": value.item()}


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [{"task": name, **trained(model, losses, lr)} for lr in RATES for name, model, losses in tasks()]
    record = {"steps": STEPS, "stalled": stalled(), "found": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = [[x["task"], f"{x['lr']:g}", *(f"{x[k]:.1%}" for k in ("predicted", "weights", "moments"))] for x in found]
    print("\n".join(table(["task", "lr", "predicted", "weights that stayed", "second moments that stayed"], rows)))
    print(f"second moments, predicted: {record['stalled']:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
