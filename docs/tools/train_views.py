"""The demo's language model trained with linear layers that see 8 bits of their weights: views of them, or Fp8Weights.

    python -m docs.tools.train_views               runs that docs/benchmarks/views.json lacks, then the page's table
    python -m docs.tools.train_views --seeds 8     the same with more seeds

Runs of one seed start from the same weights and see the same batches; states have 8 bits, and layers multiply in bf16.
They differ in what the forward, the gradients of inputs and the validation read: the parameter, in bf16, its view, or
the codes of an Fp8Weight.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from docs.tools.train_rules import RULES, STEPS, Rule, key_of, make, with_table
from optgen.cast import fp8_weights
from optgen.formats import Native, Plan, SplitFp8
from specs.plans import int8_split24
from tools.demo import mean_and_interval, mean_and_spread
from tools.demo_model import Corpus, Linear, Size, corpus, train
from tools.prose import packed, table

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "docs/benchmarks/views.json", ROOT / "docs/benchmarks/views.md"
TRAINED = tuple(rule for rule in RULES if rule.name in ("AdamW", "Muon"))
VIEW = ("mxfp8_rows",)
STORED: dict[str, Plan] = {
    "bf16, of 24 bits": int8_split24,
    "view, of 24 bits": int8_split24.but(views=VIEW, name="viewed"),
    "Fp8Weight, of 24 bits": int8_split24.but(master=SplitFp8(), name="shows_fp8"),
    "bf16, of 16 bits": int8_split24.but(master=Native("stochastic"), name="bf16_alone"),
    "view, of 16 bits": int8_split24.but(master=Native("stochastic"), views=VIEW, name="viewed_bf16"),
}
"""What layers read, and the bits of a weight -> the plan; the first is the one that others are compared with."""


def one_run(rule: Rule, stored: str, seed: int, text: Corpus) -> tuple[float, float]:
    """Train once by one thread; return the validation loss at the end, and bytes per parameter."""
    torch.set_num_threads(1)
    plan, bytes_of = STORED[stored], list[float]()

    def optimizer_of(model: nn.Module) -> Any:
        for layer in model.modules():
            if isinstance(layer, Linear):
                layer.__class__ = nn.Linear  # which multiplies in the dtype of autocast
        if isinstance(plan.master, SplitFp8):
            fp8_weights(model)
        optimizer: Any = make(rule, plan, model, rule.options["lr"])
        if plan.views:
            shown.enter_context(optimizer.use_views(model))
        bytes_of.append(optimizer.memory().per_element)
        return optimizer

    with ExitStack() as shown:
        shown.enter_context(torch.autocast("cpu", torch.bfloat16))
        run = train(text, Size(), optimizer_of, dtype=torch.bfloat16, steps=STEPS["fixed"], seed=seed)
    return run.final, round(bytes_of[0], 4)


def rows(runs: dict[str, tuple[float, float]], seeds: int) -> list[list[str]]:
    """Return the table's rows, of the first seeds that all ways of storage have been trained with."""
    made = []
    for rule in TRAINED:
        keys = [[key_of(rule.name, x, seed, rule.options["lr"]) for x in STORED] for seed in range(seeds)]
        done = [[runs[key] for key in seed] for seed in keys if all(key in runs for key in seed)]
        for stored, found in zip(STORED, zip(*done, strict=True), strict=False):
            mean, half = mean_and_interval([x[0] - seed[0][0] for x, seed in zip(found, done, strict=True)])
            base, noise = mean_and_spread(seed[0][0] for seed in done)
            loss = f"{mean:+.4f} ± {half:.4f}" if stored != next(iter(STORED)) else f"{base:.4f} ± {noise:.4f}"
            made.append([rule.name, stored, str(len(done)), f"{found[0][1]:.2f}", loss])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds, text = parser.parse_args().seeds, corpus()
    kept: dict[str, Any] = {"text": text.digest, "torch": torch.__version__, "runs": {}}
    if RECORD.exists():
        kept = json.loads(RECORD.read_text(encoding="utf-8"))
    if kept["text"] != text.digest:
        raise SystemExit(f"train_views: {RECORD} is of the text {kept['text']}, not of {text.digest}")
    for seed, rule, stored in product(range(seeds), TRAINED, STORED):
        key = key_of(rule.name, stored, seed, rule.options["lr"])
        if key not in kept["runs"]:
            kept["runs"][key] = one_run(rule, stored, seed, text)
            RECORD.write_text(packed(kept), encoding="utf-8")
            print(f"{key}: {kept['runs'][key][0]:.4f}", flush=True)
    head = ("rule", "layers read", "seeds", "B/param", "loss, or minus the first")
    found = table(head, rows(kept["runs"], seeds), (0, 1))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "Training", found), encoding="utf-8")


if __name__ == "__main__":
    main()
