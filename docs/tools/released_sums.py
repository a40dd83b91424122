"""Train three small tasks by rules with sums over the model, in ordinary steps and with gradients released.

    python -m docs.tools.released_sums                         the table of docs/benchmarks/released-sums.md
    python -m docs.tools.released_sums sorting --seeds 3       of one task

Both ways start from the same weights and see the same batches, seed by seed, under int8_split24; needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from docs.tools.evidence import TASKS, Task, fit, logits
from optgen.by_name import class_of
from tools.demo import mean_and_interval, mean_and_spread
from tools.prose import table

RULES: dict[str, dict[str, Any]] = {
    "prodigy": {"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 0.01},
    "schedule_free(prodigy)": {"lr": 1.0, "betas": (0.0, 0.99)},
    "clipped(adamw)": {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_norm": 0.3},
}


def loss_of(task: Task, rule: str, seed: int, released: bool) -> float:
    """Train once, and return the loss on the test data."""
    torch.manual_seed(seed)
    model = task.model().to(torch.bfloat16)
    optimizer = class_of(rule)(model.named_parameters(), plan="int8_split24", **RULES[rule])
    if released:
        optimizer.release_gradients(model, sums="previous")
    pairs, apart = task.data(seed, task.steps)
    fit(model, optimizer, pairs, task.steps)
    optimizer.eval()
    with torch.no_grad():
        out, y = (torch.cat(part) for part in zip(*((logits(model, x), y.flatten()) for x, y in apart), strict=True))
    return float(F.cross_entropy(out, y))


def rows(tasks: list[Task], rules: list[str], seeds: int) -> Iterator[list[str]]:
    for task in tasks:
        for rule in rules:
            usual, ours = ([loss_of(task, rule, seed, way) for seed in range(seeds)] for way in (False, True))
            (mean, spread), (gap, half) = (
                mean_and_spread(usual),
                mean_and_interval([b - a for a, b in zip(usual, ours, strict=True)]),
            )
            yield [task.name, f"`{rule}`", f"{mean:.4f} ± {spread:.4f}", f"{gap:+.4f} ± {half:.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", nargs="*", default=[task.name for task in TASKS[:3]])
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=RULES)
    parser.add_argument("--seeds", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [task for task in TASKS if task.name in asked.tasks]
    head = "task", "rule", "loss, ordinary steps", "released - ordinary"
    print(*table(head, list(rows(tasks, asked.rules, asked.seeds)), (0, 1)), sep="\n")


if __name__ == "__main__":
    main()
