"""The demo: a small language model trained with generated optimizers beside torch's AdamW, on the CPU.

    make demo                       about three minutes on two cores
    make demo ARGS="--quick"        about half a minute: everything runs, the losses say little
    make demo ARGS="--steps 2000 --seeds 5"

Four ways to keep weights and AdamW's states, each with the same seeds (same start, same batches); then a spec that is
not among the ready-made ones is built and used.  Writes demo_out/results.json, demo_out/loss.png and demo_out/project.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.demo_model import Corpus, Run, Size, corpus, train
from tools.prose import table

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo_out"
EXAMPLE = ROOT / "examples" / "signed_momentum.py"

SIZE = Size()
STEPS, SEEDS, PEAK = 600, 3, 1.5e-3
QUICK_STEPS, QUICK_SEEDS = 60, 2
BASE = "torch fp32"

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal one is near enough.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Contestant:
    """A row of the table: the format of the weights, and the optimizer."""

    name: str
    dtype: torch.dtype
    words: str


CONTESTANTS = (
    Contestant(BASE, torch.float32, "torch.optim.AdamW, everything in fp32"),
    Contestant("optgen fp32", torch.float32, "generated AdamW, plan fp32"),
    Contestant("optgen int8_split24", torch.bfloat16, "generated AdamW, bf16 weight + 8 bits, 8-bit states"),
    Contestant("torch bf16", torch.bfloat16, "torch.optim.AdamW on a plain bf16 model"),
)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a contestant, with the same hyper-parameters for all."""
    options: dict[str, Any] = {"lr": PEAK, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if name.startswith("torch"):
        return torch.optim.AdamW(model.parameters(), **options)
    from optgen.optim import AdamW

    optimizer: torch.optim.Optimizer = AdamW(model.parameters(), plan=name.split()[1], **options)
    return optimizer


def one_run(name: str, seed: int, steps: int, text: Corpus) -> Run:
    """Train once, in a worker process."""
    torch.set_num_threads(1)
    contestant = next(c for c in CONTESTANTS if c.name == name)
    made = lambda model: make_optimizer(name, model)  # noqa: E731
    return train(text, SIZE, made, dtype=contestant.dtype, steps=steps, seed=seed, peak=PEAK)


def run_all(text: Corpus, steps: int, seeds: int, jobs: int) -> dict[str, list[Run]]:
    """Train every contestant with every seed, `jobs` at a time with one thread each; print a line for each run."""
    # Seed by seed, so that runs which are compared with each other share the machine's moods.
    order = [(c.name, seed) for seed in range(seeds) for c in CONTESTANTS]
    runs: dict[tuple[str, int], Run] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(one_run, name, seed, steps, text): (name, seed) for name, seed in order}
        for future in as_completed(futures):
            name, seed = futures[future]
            runs[name, seed] = future.result()
            print(f"{name}, seed {seed}: validation loss {runs[name, seed].final:.4f}", flush=True)
    return {c.name: [runs[c.name, seed] for seed in range(seeds)] for c in CONTESTANTS}


@dataclass(frozen=True)
class Difference:
    """Paired differences of final losses to the fp32 run of the same seed."""

    mean: float
    half_width: float  # of the 95 % interval; infinite with one seed
    noise: float  # standard deviation over seeds of the fp32 run itself

    def sentence(self, name: str) -> str:
        interval = f"{self.mean:+.4f} ± {self.half_width:.4f} nats"
        if math.isinf(self.half_width):
            return f"{name}: {self.mean:+.4f} nats against {BASE} with one seed; more seeds are needed to say anything."
        if abs(self.mean) <= self.half_width:
            verdict = "no difference that these seeds can show"
        else:
            verdict = "measurably " + ("worse" if self.mean > 0 else "better")
        beside = f"seed noise of {BASE}: {self.noise:.4f}"
        return f"{name}: {interval} against {BASE} (paired, 95 %); {beside}: {verdict}."


def difference(runs: list[Run], base: list[Run]) -> Difference:
    noise = statistics.stdev(r.final for r in base) if len(base) > 1 else math.inf
    return Difference(*mean_and_interval([a.final - b.final for a, b in zip(runs, base, strict=True)]), noise)


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval, which is infinite for one value."""
    count = len(values)
    half = T95.get(count - 1, 1.96) * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.inf
    return statistics.mean(values), half


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    numbers = list(values)
    return statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def shown(results: dict[str, list[Run]]) -> list[str]:
    """Return the table: AdamW, four ways to keep its numbers."""
    rows = []
    for contestant in CONTESTANTS:
        runs = results[contestant.name]
        first = runs[0]
        weights, state = first.weight_bytes / first.parameters, first.state_bytes / first.parameters
        mean, spread = mean_and_spread(r.final for r in runs)
        gap = difference(runs, results[BASE])
        took, own = (statistics.median(getattr(r, x) for r in runs) for x in ("step_ms", "optimizer_ms"))
        rows.append((
            contestant.name, f"{weights:.0f} + {state:.2f}", f"{first.state_bytes / 2**20:.2f}",
            f"{mean:.4f} ± {spread:.4f}", "" if contestant.name == BASE else f"{gap.mean:+.4f} ± {gap.half_width:.4f}",
            f"{took:.0f} ({own:.1f})",
        ))  # fmt: skip
    head = ("AdamW", "bytes", "state, MiB", "final loss ± spread", "to fp32 ± 95 %", "ms a step (optimizer)")
    return table(head, rows, (0,))


def plot(results: dict[str, list[Run]], path: Path) -> None:
    """Plot validation loss over steps: mean line, band from the lowest to the highest seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    for contestant, style in zip(CONTESTANTS, ("-", "--", "-", ":"), strict=True):
        runs = results[contestant.name]
        steps = [step for step, _ in runs[0].validation]
        curves = list(zip(*([loss for _, loss in r.validation] for r in runs), strict=True))
        means = [statistics.mean(c) for c in curves]
        (line,) = left.plot(steps, means, style, label=contestant.name)
        left.fill_between(steps, [min(c) for c in curves], [max(c) for c in curves], alpha=0.15, color=line.get_color())
        gaps = [r.final - b.final for r, b in zip(runs, results[BASE], strict=True)]
        right.plot(gaps, [contestant.name] * len(gaps), "o", color=line.get_color())
    left.set(xlabel="step", ylabel="validation loss (nats per byte)")
    left.legend()
    right.axvline(0, color="gray", linewidth=0.8)
    right.set(xlabel=f"final loss minus {BASE}, same seed")
    right.invert_yaxis()
    figure.savefig(path, dpi=130)
    plt.close(figure)


USE_IT = """
import sys, torch
from tools.demo_model import Size, corpus, train
from generated import SignedMomentum

torch.set_num_threads(1)
losses = []
run = train(corpus(), Size(), lambda model: SignedMomentum(model.parameters(), lr=1e-3),
            dtype=torch.bfloat16, steps=int(sys.argv[1]), seed=0, peak=1e-3,
            report=lambda step, loss: losses.append(loss))
per_parameter = (run.weight_bytes + run.state_bytes) / run.parameters
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, {per_parameter:.2f} bytes per parameter")
"""


def new_spec(steps: int) -> str:
    """Do as a user does: a project folder with a spec, `optgen build`, `from generated import ...`."""
    project = OUT / "project"
    shutil.rmtree(project, ignore_errors=True)
    (project / "specs").mkdir(parents=True)
    shutil.copy(EXAMPLE, project / "specs")
    print(EXAMPLE.read_text())
    start = time.monotonic()
    # What stands in the project folder comes before the repository's own `generated`.
    path = os.pathsep.join([str(project), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    build = [sys.executable, "-m", "optgen", "build"]
    subprocess.run(build, cwd=project, env=environment, check=True)
    took = time.monotonic() - start
    print(f"optgen build: {took:.1f} s, written to {project.relative_to(ROOT)}/generated")
    use = [sys.executable, "-c", USE_IT, str(steps)]
    done = subprocess.run(use, cwd=project, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    said = done.stdout.strip().splitlines()[-1]
    print(f"from generated import SignedMomentum, bf16 model: {said}")
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help=f"training steps per run ({STEPS})")
    parser.add_argument("--seeds", type=int, help=f"runs per optimizer ({SEEDS})")
    parser.add_argument("--jobs", type=int, help="runs at a time, one thread each (number of cores, at most 4)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, {QUICK_SEEDS} seeds")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (QUICK_STEPS if chosen.quick else STEPS)
    chosen.seeds = chosen.seeds or (QUICK_SEEDS if chosen.quick else SEEDS)
    chosen.jobs = chosen.jobs or min(4, os.cpu_count() or 1)
    if min(chosen.steps, chosen.seeds, chosen.jobs) < 1:
        parser.error("--steps, --seeds and --jobs are at least 1")
    return chosen


def main() -> int:
    chosen = arguments()
    OUT.mkdir(exist_ok=True)
    start = time.monotonic()
    text = corpus()
    print(
        f"text: {text.files} files of Python's standard library, {len(text.train) / 2**20:.1f} MiB to train, "
        f"{len(text.validation) / 2**20:.1f} MiB to validate (sha256 {text.digest})"
    )
    print(
        f"model: byte-level transformer, {SIZE.layers} layers, width {SIZE.width}, context {SIZE.context}; "
        f"{chosen.steps} steps, {chosen.seeds} seeds, {chosen.jobs} runs at a time"
    )
    results = run_all(text, chosen.steps, chosen.seeds, chosen.jobs)
    print("", *shown(results), "", sep="\n")
    print(
        "bytes: weights + optimizer state, counted; loss: validation, nats per byte, mean over seeds; "
        f"to fp32: minus {BASE}, paired by seed."
    )
    verdicts = [difference(results[c.name], results[BASE]).sentence(c.name) for c in CONTESTANTS[1:]]
    for verdict in verdicts:
        print(verdict)
    print(
        f"(`optgen fp32` computes what `{BASE}` does up to rounding: its row shows what rounding alone does to a "
        "run.  Times are of one thread beside other runs: no benchmark.)"
    )
    plot(results, OUT / "loss.png")
    print("\na new rule:\n")
    said = new_spec(20 if chosen.quick else 60)
    record = {
        "arguments": vars(chosen),
        "model": asdict(SIZE),
        "text": {"files": text.files, "sha256": text.digest},
        "torch": torch.__version__,
        "runs": {name: [asdict(run) for run in runs] for name, runs in results.items()},
        "verdicts": verdicts,
        "new_spec": said,
        "seconds": round(time.monotonic() - start, 1),
    }
    (OUT / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['seconds']} s; written: demo_out/loss.png, demo_out/results.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
