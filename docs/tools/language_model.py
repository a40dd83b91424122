"""Train a language model of 11 million parameters by AdamW and Muon, in fp32 and in few bits.

    python -m docs.tools.language_model --work DIR      runs that docs/benchmarks/language_model.json lacks, one by one
    python -m docs.tools.language_model --page          picture and page of the runs that are there

Needs tokenizers, and about half an hour of one core a run. A run that is stopped goes on from its last checkpoint in
DIR, bit for bit on the same processor. Runs of one seed start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from docs.tools.train_rules import ADAMW, Rule, key_of, make, rate_found, with_table
from tools.bench.race import cpu_model
from tools.demo import mean_and_interval
from tools.demo_model import Corpus, LanguageModel, Size, batches, corpus, loss_of, rate, stored_bytes, validate
from tools.prose import packed, table

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "docs/benchmarks/language_model.json", ROOT / "docs/evidence.md"
SIZE = Size(layers=7, width=320, heads=5, context=256, batch=8, vocabulary=4096)
STEPS, TUNING_STEPS = 1024, 128  # the search for rates takes the first steps of the whole schedule
WINDOW, EVERY, HELD_OUT = 16, 64, 16  # steps of a mean training loss; steps between validations; batches of those
SAVE_SECONDS = 120
CONTROL = "fp32, rows reversed"  # the same sums in another order
PAIR, OTHERS = ("fp32", "int8_split24"), ("fp32_master", CONTROL, "int4_split24", "flashoptim")
TUNING, SEEDS = 0, (1, 2, 3)
QUEUE = [(PAIR, SEEDS[:1]), (OTHERS, SEEDS[:1]), (PAIR, SEEDS[1:])]  # plans of both rules, and seeds
RULES = (  # AdamW's lr: where its search begins; that of Muon is the usual one, since 128 steps ask for smaller ones
    Rule("AdamW", "adamw", {**ADAMW, "lr": 1e-3}),
    Rule("Muon", "muon", {"lr": 2e-2, "weight_decay": 0.1}, {"adamw": True}),
)


HEADING = "A language model of 11 million parameters"
SECTION = """\
The demo's model with 7 layers of width 320, trained on Python's standard library: 1,024 steps of 8 x 256 tokens, 2.1
million in all, of a byte-level BPE with 4,096 entries. Layers multiply in bf16. Plans in few bits start from the same
weights as fp32, and runs of one seed see the same batches. AdamW has betas (0.9, 0.95); under Muon embeddings, vectors
and the head have AdamW. The weight decay is 0.1. AdamW's learning rate had the least loss after the first 128 steps in
fp32, with a seed that is in no row. Under Muon matrices have the usual 0.02, since 128 steps would choose too small a
rate for them, and the rest has AdamW's.

Rows of *fp32* are validation losses in nats per token, as means over quarters of the run. Other rows are differences to
them, seed by seed, and have a 95 % interval where there are three seeds. *rows reversed* is fp32 with the rows of each
batch in reverse order: the same sums, rounded otherwise. A difference of one seed that is not well above that row's may
be rounding alone. *fp32_master*: fp32 states and masters beside bf16 weights.

    .venv/bin/python -m docs.tools.language_model

|

![Losses along the runs, and their differences to fp32](images/language_model.svg)"""


def text() -> Corpus:
    """Return the demo's text as tokens of a byte-level BPE, trained on the part of it that is not held out."""
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as e:
        raise SystemExit(f"language_model: {e}; `pip install tokenizers` brings it") from None
    raw = corpus()
    train, held_out = (bytes(part.numpy()).decode(errors="replace") for part in (raw.train, raw.validation))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([train], SIZE.vocabulary, show_progress=False)
    return replace(raw, train=torch.tensor(bpe.encode(train).ids), validation=torch.tensor(bpe.encode(held_out).ids))


def one_run(
    rule: Rule, plan: str, seed: int, lr: float, steps: int, data: Corpus, size: Size, path: Path,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:  # fmt: skip
    """Train by one thread, from the checkpoint at `path` if there is one; it is deleted at the end.

    `steps` may end it before the schedule of STEPS ends. Layers multiply in bf16, from weights in fp32 or in the plan's
    bits. Returns the means of training losses, the validation losses, bytes per parameter, seconds and processors.
    """
    import optgen

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: torch.nn.Module = LanguageModel(size)
    if plan not in ("fp32", CONTROL):
        optgen.cast_model(model, torch.bfloat16)
    optimizer: Any = make(rule, "fp32" if plan == CONTROL else plan, model, lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    done: dict[str, Any] = {"step": 0, "train": [], "validation": [], "part": [], "seconds": 0.0, "processors": []}
    if path.exists():
        done = optgen.load_checkpoint(path, optimizer, model)
    done["processors"] = list(dict.fromkeys([*done["processors"], cpu_model()]))
    begin, saved = time.process_time() - done["seconds"], time.monotonic()
    for x, y in islice(batches(data.train, size, steps, seed), done["step"], None):
        if plan == CONTROL:
            x, y = x.flip(0), y.flip(0)
        for group, largest in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate(done["step"], STEPS, largest)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done["part"].append(float(loss.detach()))
        done["step"] += 1
        if done["step"] % WINDOW == 0:
            done["train"].append(round(sum(done["part"]) / WINDOW, 5))
            done["part"] = []
        if done["step"] % EVERY == 0:
            with torch.autocast("cpu", torch.bfloat16):
                done["validation"].append(round(validate(model, data.validation, size, HELD_OUT), 5))
        done["seconds"] = time.process_time() - begin
        if time.monotonic() - saved > SAVE_SECONDS:
            optgen.save_checkpoint(path, optimizer, model, done)
            saved = time.monotonic()
        report(done["step"], float(loss.detach()))
    path.unlink(missing_ok=True)
    parameters = sum(p.numel() for p in model.parameters())
    kept = {name: done[name] for name in ("train", "validation", "processors")}
    return kept | {
        "parameters": parameters, "bytes": sum(stored_bytes(model, optimizer)) / parameters,
        "seconds": round(done["seconds"]), "torch": torch.__version__,
    }  # fmt: skip


def next_run(kept: dict[str, Any]) -> tuple[str, Rule, str, int, float, int] | None:
    """Return a part of the record, and the run that it needs next: one of QUEUE, or of the search for its rate."""
    for plans, seeds in QUEUE:
        for seed in seeds:
            for rule, lr, tries in found_rates(kept):
                if tries:
                    return "rates", rule, "fp32", TUNING, tries[len(tries) // 2], TUNING_STEPS
                for plan in plans:
                    if key_of(rule.name, plan, seed, lr) not in kept["runs"]:
                        return "runs", rule, plan, seed, lr, STEPS
    return None


def found_rates(kept: dict[str, Any]) -> list[tuple[Rule, float, list[float]]]:
    """Return the rules with their learning rates, and those that are to be tried for AdamW, which Muon has, too."""
    adamw, muon = RULES
    lr, tries = rate_found(adamw, kept["rates"])
    return [(adamw, lr, tries), (replace(muon, options=muon.options | {"adamw_lr": lr}), muon.options["lr"], [])]


def load(made: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the record; SystemExit if it is of another text, model or length than `made`."""
    kept: dict[str, Any] = {"made": made, "rates": {}, "runs": {}}
    if RECORD.exists():
        kept = json.loads(RECORD.read_text(encoding="utf-8"))
    if made and kept["made"] != made:
        raise SystemExit(f"language_model: {RECORD} is of {kept['made']}, not of {made}; delete it to begin anew")
    return kept


def run_all(folder: Path) -> None:
    """Make the runs that are missing, and write each down at its end."""
    folder.mkdir(parents=True, exist_ok=True)
    data = text()
    made = {"text": data.digest, "tokens": len(data.train), "held_out": len(data.validation), "steps": STEPS}
    kept = load(made | asdict(SIZE))
    while run := next_run(kept):
        part, rule, plan, seed, lr, steps = run
        key = key_of(rule.name, plan, seed, lr)

        def report(step: int, loss: float, key: str = key) -> None:
            if step % EVERY == 0:
                print(json.dumps({"run": key, "step": step, "loss": round(loss, 4)}), flush=True)

        found = one_run(rule, plan, seed, lr, steps, data, SIZE, folder / f"{key}.checkpoint", report)
        kept[part][key] = found if part == "runs" else [found["validation"][-1]]
        RECORD.write_text(packed(kept), encoding="utf-8")


def pairs(kept: dict[str, Any], rule: str, plan: str, lr: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the runs of fp32 and of a plan, for seeds that have both."""
    keys = [[key_of(rule, name, seed, lr) for name in ("fp32", plan)] for seed in SEEDS]
    return [(kept["runs"][a], kept["runs"][b]) for a, b in keys if a in kept["runs"] and b in kept["runs"]]


def rows(kept: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows: validation losses of fp32, then differences to it, as means over quarters of a run."""
    made = []
    for rule, lr, _ in found_rates(kept):
        for plan in ("fp32", *PAIR[1:], *OTHERS):
            if not (seeds := pairs(kept, rule.name, plan, lr)):
                continue
            quarters = [np.reshape([run["validation"] for run in both], (2, 4, -1)).mean(2) for both in seeds]
            cells = [f"{loss:.4f}" for loss in np.mean(quarters, 0)[0]]
            if plan != "fp32":
                cells = [difference(list(quarter)) for quarter in np.transpose([few - base for base, few in quarters])]
            made.append([f"{rule.name}, {plan}", str(len(seeds)), f"{seeds[0][1]['bytes']:.2f}", *cells])
    return made


def difference(seeds: list[float]) -> str:
    """Return the mean over seeds, with its 95 % interval if there are at least three."""
    mean, half = mean_and_interval(seeds)
    return f"{mean:+.4f}" + (f" ± {half:.4f}" if len(seeds) > 2 else "")


def page(kept: dict[str, Any], text: str) -> str:
    """Return the text of evidence.md with the section of this model, as soon as two runs can be compared."""
    found = rows(kept)
    if len(found) < 2:
        return text
    if f"\n## {HEADING}\n" not in text:
        text = text.replace("\n## ", f"\n## {HEADING}\n\n{SECTION}\n\n## ", 1)
    ends = [STEPS * k // 4 for k in range(5)]
    steps = [f"steps {a + 1} to {b}" for a, b in pairwise(ends)]
    return with_table(text, HEADING, table(("run", "seeds", "B/param", *steps), found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "language_model", help="the checkpoints' folder")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    if not asked.page:
        run_all(asked.work)
    kept = load()
    PAGE.write_text(page(kept, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if len(rows(kept)) > 1:
        from docs.tools.draw import write  # which reads this record

        write("language_model")


if __name__ == "__main__":
    main()
