"""The demo's language model trained by rules that look at more than one element: each in fp32 and in 8 bits.

    .venv/bin/python tools/train_rules.py                   writes docs/training.md and docs/benchmarks/training.json
    .venv/bin/python tools/train_rules.py --only CAME --steps 200 --seeds 1
    .venv/bin/python tools/train_rules.py --only LAMB --lr 3e-3 1e-2 3e-2 --seeds 1      how a learning rate was found

Every pair starts from the same weights and sees the same batches in the same order, seed by seed; the learning rate is
the rule's own, found by a coarse search in fp32 and used for both.  What is said of a pair is the mean of its paired
differences with the 95 % interval of Student's t, beside the noise of the seeds themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo import T95, mean_and_spread
from demo_model import Corpus, Run, Size, corpus, train
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
STEPS, SEEDS = 600, 3
PLANS = {"fp32": torch.float32, "int8_split24": torch.bfloat16}


@dataclass(frozen=True)
class Rule:
    """A generated class and how it is used here; `aside`: options of embeddings, norms and the head."""

    name: str
    spec: str
    options: Mapping[str, Any]
    aside: Mapping[str, Any] = field(default_factory=dict)


RULES = (
    Rule("AdamW", "adamw", {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    Rule("CAME", "came", {"lr": 5e-4, "weight_decay": 0.1}),
    Rule("Adafactor", "adafactor", {"lr": 1e-1, "weight_decay": 0.1}),
    Rule("LAMB", "lamb", {"lr": 4e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    Rule("StableAdamW", "stable_adamw", {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    Rule(
        "ScheduleFreeAdamW",
        "schedule_free_adamw",
        {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 30},
    ),
    Rule("Muon", "muon", {"lr": 3e-2, "weight_decay": 0.1, "adamw_lr": 1.5e-3}, {"adamw": True}),
)


def make(rule: Rule, plan: str, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of a rule; two groups where the rule treats embeddings and the head apart."""
    import optgen

    cls = optgen.compile(rule.spec, plan=plan)
    named = list(model.named_parameters())
    if not rule.aside:
        return cls([p for _, p in named], plan=plan, **options)
    apart = [p for name, p in named if p.ndim < 2 or name.split(".")[0] in ("tokens", "positions", "head")]
    body = [p for name, p in named if all(p is not q for q in apart)]
    return cls([{"params": body}, {"params": apart, **rule.aside}], plan=plan, **options)


def one_run(name: str, plan: str, seed: int, steps: int, lr: float | None, text: Corpus) -> Run:
    """What a worker process does."""
    torch.set_num_threads(1)
    rule = next(r for r in RULES if r.name == name)
    options = {**rule.options, **({"lr": lr} if lr else {})}
    return train(
        text, Size(), lambda model: make(rule, plan, model, options), dtype=PLANS[plan], steps=steps, seed=seed
    )


@dataclass(frozen=True)
class Verdict:
    """A pair's losses, and the paired differences of 8 bits to fp32."""

    rule: str
    lr: float
    fp32: list[float]
    int8: list[float]
    bytes_fp32: float
    bytes_int8: float

    @property
    def gap(self) -> tuple[float, float]:
        """(mean, half width of the 95 % interval)."""
        pairs = [b - a for a, b in zip(self.fp32, self.int8, strict=True)]
        if len(pairs) < 2:
            return pairs[0], math.inf
        half = T95.get(len(pairs) - 1, 1.96) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        return statistics.mean(pairs), half

    @property
    def words(self) -> str:
        mean, half = self.gap
        if math.isinf(half):
            return "one seed says nothing"
        if abs(mean) <= half:
            return "no difference that these seeds show"
        return "measurably " + ("worse" if mean > 0 else "better")


def row(v: Verdict) -> list[str]:
    (a, noise), (b, _), (mean, half) = mean_and_spread(v.fp32), mean_and_spread(v.int8), v.gap
    return [
        v.rule, f"{v.lr:g}", f"{a:.4f} ± {noise:.4f}", f"{b:.4f}", f"{mean:+.4f} ± {half:.4f}", v.words,
        f"{v.bytes_fp32:.2f}", f"{v.bytes_int8:.2f}",
    ]  # fmt: skip


HEAD = ("rule", "lr", "fp32", "8 bits", "8 bits - fp32", "", "B/param fp32", "B/param 8 bits")


def markdown(verdicts: list[Verdict], steps: int, seeds: int, text: Corpus) -> str:
    lines = [
        "# Training with rules that look at more than one element", "",
        f"The demo's language model ({Size().layers} layers of width {Size().width}, on bytes of the Python standard",
        f"library, text {text.digest}), {steps} steps, {seeds} seeds; validation loss at the end, nats per byte: mean",
        "and standard deviation over seeds.  *8 bits* is plan int8_split24 with bf16 weights, *fp32* is all in fp32;",
        "both start from the same weights, see the same batches and have the same learning rate, seed by seed.",
        "The difference is paired, with the 95 % interval of Student's t; *B/param* counts weights and states as they",
        "stand in memory (tensors below 4096 elements keep fp32 states).  The rules' learning rates come from a coarse",
        "search, so the table compares formats within a rule, not the rules with one another.",
        "",
        "    .venv/bin/python tools/train_rules.py", "",
        "| " + " | ".join(HEAD) + " |", "|---|" + "--:|" * 4 + "---|--:|--:|",
    ]  # fmt: skip
    return "\n".join([*lines, *("| " + " | ".join(row(v)) + " |" for v in verdicts)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=[], help="rules by class name")
    parser.add_argument("--lr", nargs="*", type=float, default=[], help="learning rates to try, in fp32 only")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    console, text = Console(), corpus()
    rules = [r for r in RULES if not asked.only or r.name in asked.only]
    plans = ["fp32"] if asked.lr else list(PLANS)
    wanted = [
        (r.name, plan, seed, lr)
        for r in rules
        for lr in (asked.lr or [None])
        for plan in plans
        for seed in range(asked.seeds)
    ]
    found: dict[tuple[str, str, int, float | None], Run] = {}
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = {pool.submit(one_run, n, plan, s, asked.steps, lr, text): (n, plan, s, lr) for n, plan, s, lr in wanted}
        for done in as_completed(runs):
            found[runs[done]] = done.result()
            name, plan, seed, lr = runs[done]
            console.print(f"{name} {plan} seed {seed}" + (f" lr {lr:g}" if lr else "") + f": {done.result().final:.4f}")
    if asked.lr:
        return 0
    verdicts = []
    for r in rules:
        each = {plan: [found[r.name, plan, s, None] for s in range(asked.seeds)] for plan in PLANS}
        size = {p: (x[0].weight_bytes + x[0].state_bytes) / x[0].parameters for p, x in each.items()}
        losses = {p: [x.final for x in runs_] for p, runs_ in each.items()}
        verdicts.append(
            Verdict(r.name, r.options["lr"], losses["fp32"], losses["int8_split24"], size["fp32"], size["int8_split24"])
        )
    table = Table(*HEAD)
    for v in verdicts:
        table.add_row(*row(v))
    console.print(table)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "training.md").write_text(markdown(verdicts, asked.steps, asked.seeds, text), encoding="utf-8")
    kept = {"steps": asked.steps, "seeds": asked.seeds, "text": text.digest, "verdicts": [asdict(v) for v in verdicts]}
    (asked.out / "benchmarks").mkdir(exist_ok=True)
    (asked.out / "benchmarks" / "training.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
