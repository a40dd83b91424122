"""The demo's language model trained by many rules, each in fp32 and in 8 bits; and by AdamW under many plans.

    .venv/bin/python tools/train_rules.py                   writes docs/training.md and docs/benchmarks/training.json
    .venv/bin/python tools/train_rules.py --plans           the same of AdamW under every plan with states below fp32
    .venv/bin/python tools/train_rules.py --plans int4_split24 flashoptim       these alone; others stay as they are
    .venv/bin/python tools/train_rules.py --only CAME --steps 200 --seeds 1
    .venv/bin/python tools/train_rules.py --only LAMB --lr 3e-3 1e-2 3e-2 --seeds 1      how a learning rate was found

Every pair starts from the same weights and sees the same batches in the same order, seed by seed; the learning rate is
the rule's own, found by a coarse search in fp32 and used for both.  What is said of a pair is the mean of its paired
differences with the 95 % interval of Student's t, beside the noise of the seeds themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo import mean_and_interval, mean_and_spread
from demo_model import Corpus, Run, Size, corpus, train
from prose import filled, table
from rich.console import Console
from rich.table import Table
from torch import nn

# Discouraged plans are measured on purpose.
warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")

ROOT = Path(__file__).resolve().parent.parent
STEPS, SEEDS = 600, 3
PLANS = ("fp32", "int8_split24")


@dataclass(frozen=True)
class Rule:
    """A generated class and how it is used here; `aside`: options of embeddings, norms and the head."""

    name: str
    spec: str
    options: Mapping[str, Any]
    aside: Mapping[str, Any] = field(default_factory=dict)


ADAMW = {"lr": 1.5e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
RULES = (
    Rule("AdamW", "adamw", ADAMW),
    Rule("CAME", "came", {"lr": 5e-4, "weight_decay": 0.1}),
    Rule("Adafactor", "adafactor", {"lr": 1e-1, "weight_decay": 0.1}),
    Rule("LAMB", "lamb", {**ADAMW, "lr": 4e-2}),
    Rule("StableAdamW", "stable_adamw", ADAMW),
    Rule("ScheduleFreeAdamW", "schedule_free_adamw", {**ADAMW, "lr": 3e-3, "warmup_steps": 30}),
    Rule("Muon", "muon", {"lr": 3e-2, "weight_decay": 0.1, "adamw_lr": 1.5e-3}, {"adamw": True}),
)


def make(rule: Rule, plan: str, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of a rule, with two groups where the rule treats embeddings and the head apart."""
    import optgen

    cls = optgen.compile(rule.spec, plan=plan)
    named = list(model.named_parameters())
    if not rule.aside:
        return cls([p for _, p in named], plan=plan, **options)
    apart = [p for name, p in named if p.ndim < 2 or name.split(".")[0] in ("tokens", "positions", "head")]
    body = [p for name, p in named if all(p is not q for q in apart)]
    return cls([{"params": body}, {"params": apart, **rule.aside}], plan=plan, **options)


OF_FP32 = ("fp32", "int8")
"""Plans that are run on fp32 weights."""


def one_run(name: str, plan: str, seed: int, steps: int, lr: float | None, text: Corpus) -> Run:
    """Train once, in a worker process."""
    torch.set_num_threads(1)
    rule = next(r for r in RULES if r.name == name)
    options = {**rule.options, **({"lr": lr} if lr else {})}
    dtype = torch.float32 if plan in OF_FP32 else torch.bfloat16
    return train(text, Size(), lambda model: make(rule, plan, model, options), dtype=dtype, steps=steps, seed=seed)


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
        return mean_and_interval([b - a for a, b in zip(self.fp32, self.int8, strict=True)])

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


def markdown(kept: Mapping[str, Any]) -> str:
    verdicts, plans = ([Verdict(**v) for v in kept.get(key, [])] for key in ("verdicts", "plans"))
    size = Size()
    lines = [
        "# Training with rules and plans", "",
        f"The demo's language model ({size.layers} layers of width {size.width}, on bytes of the Python standard",
        "library), validation loss at the end, nats per byte: mean and standard deviation over seeds. A pair starts",
        "from the same weights, sees the same batches and has the same learning rate, seed by seed. The difference is",
        "paired, with the 95 % interval of Student's t; *B/param* counts weights and states as they stand in memory",
        "(tensors below 4096 elements keep fp32 states under most plans).",
    ]  # fmt: skip
    if verdicts:
        lines += [
            "", "## Rules", "",
            f"{kept['steps']} steps, {kept['seeds']} seeds, text {kept['text']}. *8 bits* is plan int8_split24 with",
            "bf16 weights, *fp32* is all in fp32. The rules' learning rates come from a coarse search, so the table",
            "compares formats within a rule, not the rules with one another.",
            "", "    .venv/bin/python tools/train_rules.py", "", *table(HEAD, map(row, verdicts), (0, 5)),
        ]  # fmt: skip
    if plans:
        lines += [
            "", "## Plans", "",
            f"AdamW, betas (0.9, 0.95), {kept['plan_steps']} steps, {kept['plan_seeds']} seeds, text",
            f"{kept['plan_text']}; bf16 weights (fp32 ones under `int8`). The fp32 run of a seed is the same in every",
            "row.",
            "", "    .venv/bin/python tools/train_rules.py --plans", "",
            *table(PLAN_HEAD, map(plan_row, plans), (0, 4)), "", remark(plans),
        ]  # fmt: skip
    return filled("\n".join(lines)) + "\n"


PLAN_HEAD = ("plan", "fp32", "loss", "- fp32", "", "B/param")


def plan_row(v: Verdict) -> list[str]:
    (a, noise), (b, spread), (mean, half) = mean_and_spread(v.fp32), mean_and_spread(v.int8), v.gap
    return [
        f"`{v.rule}`", f"{a:.4f} ± {noise:.4f}", f"{b:.4f} ± {spread:.4f}", f"{mean:+.4f} ± {half:.4f}", v.words,
        f"{v.bytes_int8:.2f}",
    ]  # fmt: skip


def remark(plans: list[Verdict]) -> str:
    """Return the conclusion from the table, and its limits."""
    apart = [f"`{v.rule}`" for v in plans if v.words.startswith("measurably")]
    widest = max(v.gap[1] for v in plans)
    said = f"Outside the noise: {', '.join(apart)}." if apart else "None of them is outside the noise of these seeds."
    plain = [f"`{v.rule}`" for v in plans if rounds_weights_to_nearest(v.rule)]
    if plain:
        said += (
            f" {', '.join(plain)} keep bf16 weights that are rounded to nearest, as the packages do whose numbers "
            "they give: what they lose is mostly their weights' doing."
        )
    return (
        f"{said} Differences below the widths of the intervals (up to {widest:.3f}) are not told apart by so few "
        "seeds; one interval of 95 % in twenty misses by chance, and the noise of few bits may regularise a small "
        "model. Losses find what is broken; [benchmarks/formats.md](benchmarks/formats.md) compares formats."
    )


def rounds_weights_to_nearest(plan: str) -> bool:
    """Return True if the plan stores weights as bf16 alone, rounded to nearest."""
    from optgen.formats import Native
    from specs import plans

    return plan not in OF_FP32 and getattr(plans, plan).master == Native("nearest")


def plans_asked(names: list[str]) -> list[str]:
    """Return the plans with states below fp32, or those of these names; SystemExit for one that is unknown."""
    from optgen.formats import Plan, floats
    from specs import plans

    every = {name: plan for name, plan in vars(plans).items() if isinstance(plan, Plan)}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise SystemExit(f"--plans: expected some of {', '.join(every)}, got {', '.join(unknown)}")
    return names or [name for name, plan in every.items() if plan.signed != floats.f32]


def run_all(
    console: Console, wanted: list[tuple[str, str, int, float | None]], steps: int, text: Corpus, jobs: int
) -> dict[tuple[str, str, int, float | None], Run]:
    """Return (rule, plan, seed, learning rate) -> its run."""
    found: dict[tuple[str, str, int, float | None], Run] = {}
    with ProcessPoolExecutor(jobs) as pool:
        runs = {pool.submit(one_run, n, plan, s, steps, lr, text): (n, plan, s, lr) for n, plan, s, lr in wanted}
        for done in as_completed(runs):
            found[runs[done]] = done.result()
            name, plan, seed, lr = runs[done]
            console.print(f"{name} {plan} seed {seed}" + (f" lr {lr:g}" if lr else "") + f": {done.result().final:.4f}")
    return found


def verdict(
    found: Mapping[tuple[str, str, int, float | None], Run], rule: Rule, plan: str, seeds: int, name: str
) -> Verdict:
    """Compare a plan with fp32."""
    each = {p: [found[rule.name, p, s, None] for s in range(seeds)] for p in ("fp32", plan)}
    size = {p: (x[0].weight_bytes + x[0].state_bytes) / x[0].parameters for p, x in each.items()}
    losses = {p: [x.final for x in runs] for p, runs in each.items()}
    return Verdict(name, rule.options["lr"], losses["fp32"], losses[plan], size["fp32"], size[plan])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", nargs="*", default=[], help="rules by class name")
    parser.add_argument("--lr", nargs="*", type=float, default=[], help="learning rates to try, in fp32 only")
    parser.add_argument("--plans", nargs="*", help="AdamW under these plans; no name: all with states below fp32")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    console, text = Console(), corpus()
    (asked.out / "benchmarks").mkdir(parents=True, exist_ok=True)
    record = asked.out / "benchmarks" / "training.json"
    kept: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    seeds = range(asked.seeds)
    if asked.plans is not None:
        rule, plans = RULES[0], plans_asked(asked.plans)
        wanted = [(rule.name, plan, s, None) for s in seeds for plan in ("fp32", *plans)]
        found = run_all(console, wanted, asked.steps, text, asked.jobs)
        verdicts = [verdict(found, rule, plan, asked.seeds, plan) for plan in plans]
        former = [kept.get(f"plan_{k}") for k in ("steps", "seeds", "text")]
        same = [asked.steps, asked.seeds, text.digest] == former
        old = {v["rule"]: v for v in kept.get("plans", [])} if same else {}
        kept |= {"plan_steps": asked.steps, "plan_seeds": asked.seeds, "plan_text": text.digest}
        kept["plans"] = list((old | {v.rule: asdict(v) for v in verdicts}).values())
    else:
        rules = [r for r in RULES if not asked.only or r.name in asked.only]
        tried = itertools.product(rules, asked.lr or [None], ["fp32"] if asked.lr else PLANS, seeds)
        wanted = [(r.name, plan, s, lr) for r, lr, plan, s in tried]
        found = run_all(console, wanted, asked.steps, text, asked.jobs)
        if asked.lr:
            return 0
        verdicts = [verdict(found, r, PLANS[1], asked.seeds, r.name) for r in rules]
        kept |= {"steps": asked.steps, "seeds": asked.seeds, "text": text.digest}
        kept["verdicts"] = [asdict(v) for v in verdicts]
    shown = Table(*(PLAN_HEAD if asked.plans is not None else HEAD))
    for v in verdicts:
        shown.add_row(*(plan_row(v) if asked.plans is not None else row(v)))
    console.print(shown)
    (asked.out / "training.md").write_text(markdown(kept), encoding="utf-8")
    record.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
