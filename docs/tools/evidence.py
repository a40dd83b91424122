"""Train four small tasks by AdamW, Lion, CAME and Muon, in fp32, in few bits and by bitsandbytes' 8 bits.

    python -m docs.tools.evidence              runs that docs/benchmarks/evidence.json lacks, then page and picture
    python -m docs.tools.evidence --page       page and picture of the runs that are there

Needs scikit-learn and bitsandbytes.  What was cut off goes on; runs of another processor, other versions or numbers of
steps are deleted first.  Runs that are made now keep their curves, too: to have that of an older one, delete it.  The
page's tables are written here, its text by hand.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from docs.tools.train_rules import ADAMW, Rule, Verdict, key_of, make, rate_found, with_table
from tools.bench.race import cpu_model
from tools.demo import mean_and_spread
from tools.demo_model import LanguageModel, Size, batches, corpus, rate, split, stored_bytes
from tools.prose import packed, table

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "docs/benchmarks/evidence.json", ROOT / "docs/evidence.md"
HEADINGS = "Four small tasks", "Losses in fp32"  # of the sections whose tables are written here
SEEDS, TUNING = range(1, 6), 0  # of the tables, and of the search for learning rates
PACKAGE = ("bitsandbytes, fp32 weights", "bitsandbytes, bf16 weights")
PLANS = ("int8_split24", "int4_split24")
WIDEST = 0.1  # of fp32's loss: differences with wider intervals are left out
RULES = (  # lr: where the search begins
    Rule("AdamW", "adamw", {**ADAMW, "lr": 1e-3}, plans=(*PLANS, "flashoptim", *PACKAGE)),
    Rule("Lion", "lion", {"lr": 1e-4, "weight_decay": 0.1}, plans=(*PLANS, "flashoptim", *PACKAGE)),
    Rule("CAME", "came", {"lr": 2e-4, "weight_decay": 0.1}, plans=PLANS),
    Rule("Muon", "muon", {"lr": 2e-2, "weight_decay": 0.1}, {"adamw": True}, PLANS),
)
WIDTH, ITEMS, VALUES = 64, 12, 64  # of the transformers; numbers of a list to be sorted, and how many there are
SIZE, LEARNED = Size(layers=2), 500  # the language model to be tuned, and its steps before that
LAYER: Any = dict(nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)


class CNN(nn.Sequential):
    """(batch, 1, 8, 8) pixels -> (batch, 10) logits."""

    def __init__(self) -> None:
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 2, 1)
        super().__init__(*(part for layer in convolutions for part in (layer, nn.GELU())), nn.Flatten())
        self.add_module("head", nn.Linear(256, 10))


class ViT(nn.Module):
    """(batch, 1, 8, 8) pixels -> (batch, 10) logits, by way of 16 patches of 2 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, WIDTH, 2, 2), nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, **LAYER) for _ in "12"))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        return self.head(self.norm(self.layers(h).mean(1)))


class Sorter(nn.Module):
    """(batch, 2 ITEMS) tokens of a list and an answer -> (batch, ITEMS, VALUES) logits of the answer's next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VALUES + 1, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.body = nn.Transformer(WIDTH, num_encoder_layers=2, num_decoder_layers=1, **LAYER)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, x: Tensor) -> Any:
        source, answer = (self.tokens(part) + self.positions.weight for part in x.split(ITEMS, 1))
        future = torch.ones(ITEMS, ITEMS, dtype=torch.bool).triu(1)
        return self.head(self.body(source, answer, tgt_mask=future, tgt_is_causal=True))


Pair = tuple[Tensor, Tensor]  # of a model's input and of the classes that it is to find
Found = dict[str, tuple[float, ...]]  # key_of(rule, plan, seed, lr) -> what one_run returns
WINDOW = 10  # steps of which a point of a curve is the mean


def images(seed: int, steps: int) -> tuple[Iterator[Pair], list[Pair]]:
    """Return batches of 32 of 1,200 of scikit-learn's digits that the seed draws, and its 597 others; 0 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise SystemExit(f"evidence: {e}; `pip install scikit-learn` brings the images of digits") from None
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x, random = x.float().view(-1, 1, 8, 8) / 16, torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=random)
    chosen = (order[torch.randint(1200, (32,), generator=random)] for _ in range(steps))
    return ((x[at], y[at]) for at in chosen), [(x[order[1200:]], y[order[1200:]])]


def lists(seed: int, steps: int) -> tuple[Iterator[Pair], list[Pair]]:
    """Return batches of 32 random lists with their sorted forms, and 1,024 others."""

    def some(random: torch.Generator, count: int) -> Pair:
        x = torch.randint(VALUES, (count, ITEMS), generator=random)
        y = x.sort(1).values
        return torch.cat((x, torch.full((count, 1), VALUES), y[:, :-1]), 1), y

    random, other = (torch.Generator().manual_seed(n) for n in (seed, 10**6 + seed))
    return (some(random, 32) for _ in range(steps)), [some(other, 1024)]


def manual(seed: int, steps: int) -> tuple[Iterator[Pair], list[Pair]]:
    """Return batches of Python's manual, and 24 of its held-out pieces."""
    from pydoc_data.topics import topics

    train, test = split("\n".join(topics[name] for name in sorted(topics)).encode())
    return batches(train, SIZE, steps, seed), list(batches(test, SIZE, 24, seed=12345))


def learned() -> nn.Module:
    """Return the language model after LEARNED steps of AdamW on source code that lacks the manual, trained once."""
    text = corpus()
    model, path = LanguageModel(SIZE), ROOT / "build" / f"evidence-{text.digest}.pt"
    if not path.exists():
        torch.manual_seed(0)
        model = LanguageModel(SIZE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        fit(model, optimizer, batches(text.train[: 4 << 20], SIZE, LEARNED, 0), LEARNED)
        path.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model


class Task(NamedTuple):
    """A model and its data, batches and test, of a number of steps."""

    name: str
    steps: int
    model: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Iterator[Pair], list[Pair]]]


TASKS = [Task("digits, CNN", 400, CNN, images), Task("digits, ViT", 300, ViT, images)]
TASKS += [Task("sorting", 300, Sorter, lists), Task("fine-tuning", 120, learned, manual)]


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return (positions, classes), computed in fp32 whatever weights are stored in; gradients have their dtype."""
    out: Tensor = functional_call(model, {name: p.float() for name, p in model.named_parameters()}, x)
    return out.flatten(0, -2)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, pairs: Iterator[Pair], steps: int) -> list[float]:
    """Train at rates that warm up and then fall to a tenth; return the losses of the batches."""
    losses = []
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, (x, y) in enumerate(pairs):
        for group, largest in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate(step, steps, largest)
        loss = F.cross_entropy(logits(model, x), y.flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses


def one_run(task: Task, rule: Rule, plan: str, seed: int, lr: float) -> tuple[float, ...]:
    """Train by one thread.

    Returns the loss and the accuracy on the test data, bytes per parameter, seconds, and losses in training, means of
    WINDOW steps each.
    """
    torch.set_num_threads(1)
    begin = time.process_time()
    torch.manual_seed(seed)
    model = task.model().to(torch.float32 if plan in ("fp32", PACKAGE[0]) else torch.bfloat16)
    if plan in PACKAGE:
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{rule.name}8bit")
        optimizer = cls(model.parameters(), **{**rule.options, "lr": lr})
    else:
        optimizer = make(rule, plan, model, lr)
    pairs, apart = task.data(seed, task.steps)
    losses = fit(model, optimizer, pairs, task.steps)
    curve = [float(f"{sum(losses[k : k + WINDOW]) / WINDOW:.4g}") for k in range(0, task.steps, WINDOW)]
    with torch.no_grad():
        out, y = (torch.cat(part) for part in zip(*((logits(model, x), y.flatten()) for x, y in apart), strict=True))
        loss, right = float(F.cross_entropy(out, y)), float((out.argmax(-1) == y).float().mean())
    kept = sum(stored_bytes(model, optimizer)) / sum(p.numel() for p in model.parameters())
    return loss, right, kept, time.process_time() - begin, *curve


def missing(found: Found) -> Iterator[tuple[Rule, str, int, float]]:
    """Yield the runs that a task needs next: those that find learning rates; then those of its table."""
    rates = {rule.name: rate_found(rule, found) for rule in RULES}
    adamw, tries = rates["AdamW"]
    ready = (r for r in RULES if not r.aside or not tries)
    rules = [replace(r, options=r.options | {"adamw_lr": adamw}) if r.aside else r for r in ready]
    runs = [(rule, "fp32", TUNING, lr) for rule in rules for lr in rates[rule.name][1]] or [
        (rule, plan, seed, rates[rule.name][0]) for seed in SEEDS for rule in rules for plan in ("fp32", *rule.plans)
    ]
    return (run for run in runs if key_of(run[0].name, *run[1:]) not in found)


def run_all(kept: Mapping[str, Any]) -> None:
    """Run what is missing, all tasks side by side and seed by seed, and write it down at the end of each run."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        while wanted := [(t, run) for t in TASKS for run in missing(kept["runs"].setdefault(t.name, {}))]:
            wanted.sort(key=lambda pair: pair[1][2])
            running = {pool.submit(one_run, task, *run): (task.name, run) for task, run in wanted}
            for done in as_completed(running):
                name, (rule, *rest) = running[done]
                kept["runs"][name][key_of(rule.name, *rest)] = done.result()
                RECORD.write_text(packed(kept), encoding="utf-8")
                print(f"{name}, {key_of(rule.name, *rest)}: {done.result()[0]:.4f}", flush=True)


def compared(found: Found) -> list[Verdict]:
    """Compare the losses of a task with fp32, over the first seeds that are complete."""
    rates = {rule.name: rate_found(rule, found)[0] for rule in RULES}
    cells = [[(rule.name, plan) for plan in ("fp32", *rule.plans)] for rule in RULES]
    keys = ([[key_of(*cell, s, rates[cell[0]]) for cell in rule] for rule in cells] for s in SEEDS)
    whole = [*takewhile(lambda seed: all(key in found for rule in seed for key in rule), keys)]
    verdicts = []
    for rule, *seeds in zip(cells, *whole, strict=True):
        base, *others = ([found[key] for key in runs] for runs in zip(*seeds, strict=True))
        for (name, plan), runs in zip(rule[1:], others, strict=True):
            losses = ([run[0] for run in part] for part in (base, runs))
            verdicts.append(Verdict(f"{name}, {plan}", rates[name], *losses, base[0][2], runs[0][2]))
    return verdicts


def in_fp32(found: Found, rule: Rule) -> str:
    """Return a rule's learning rate on a task, and its loss and accuracy in fp32."""
    lr = rate_found(rule, found)[0]
    runs = [found[key] for seed in SEEDS if (key := key_of(rule.name, "fp32", seed, lr)) in found]
    (loss, noise), (right, _) = (mean_and_spread([run[column] for run in runs]) for column in (0, 1))
    return f"lr {lr:g}: {loss:.4f} ± {noise:.4f}, {right:.1%}"


def page(kept: Mapping[str, Any], text: str) -> str:
    """Return the text of evidence.md with the tables of the runs that are there."""
    runs, names = [kept["runs"][task.name] for task in TASKS], [task.name for task in TASKS]
    cells = [
        (same[0].rule, f"{same[-1].bytes_few:.2f}", *(v.difference(WIDEST * mean_and_spread(v.fp32)[0]) for v in same))
        for same in zip(*map(compared, runs), strict=True)
    ]
    text = with_table(text, HEADINGS[0], table(("minus fp32", "B/param", *names), cells))
    base = [(rule.name, *(in_fp32(found, rule) for found in runs)) for rule in RULES]
    return with_table(text, HEADINGS[1], table(("rule", *names), base, range(5)))


def main() -> None:
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if "--page" not in sys.argv:
        images(0, 0), learned()  # before there are workers
        made = {name: version(name) for name in ("torch", "scikit-learn", "bitsandbytes")}
        made |= {"python": platform.python_version(), "processor": cpu_model()} | {t.name: t.steps for t in TASKS}
        kept = {"made": made, "runs": kept.get("runs", {}) if kept.get("made") == made else {}}
        run_all(kept)
    PAGE.write_text(page(kept, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    from docs.tools.draw import write  # which reads this record

    write("evidence")
    write("curves")


if __name__ == "__main__":
    main()
