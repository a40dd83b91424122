"""Draw the pictures of the documentation into docs/images, light and dark in one SVG each.

    python -m docs.tools.draw                  all of them, in some minutes
    python -m docs.tools.draw memory pareto    only these

`memory` comes from the formats, `pareto`, `kernels`, `training`, `evidence` and `curves` from docs/benchmarks, others
from runs of optgen. The same packages draw the same bytes.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
IMAGES, BENCHMARKS = ROOT / "docs" / "images", ROOT / "docs" / "benchmarks"
PAPER, INK, GRID, BLUE, ORANGE, GREEN, RED, PURPLE = COLOURS = (
    "#ffffff", "#222222", "#dcdcdc", "#3b6ea8", "#c96f12", "#2e8b57", "#c0392b", "#7d5ba6",
)  # fmt: skip
DARK = ("#15191f", "#e6e6e6", "#3a414b", "#7fb2ec", "#f0a35e", "#6fcf97", "#ff8a7a", "#c3a3ee")
"""COLOURS where a reader's system is dark, in order."""

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "optgen", "font.family": "DejaVu Sans", "font.size": 11,
    "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": INK, "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID,
    "legend.frameon": False, "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.prop_cycle": mpl.cycler(color=[*COLOURS[3:], INK]), "lines.linewidth": 1.8, "path.simplify_threshold": 0.5,
}  # fmt: skip


def figure(width: float, height: float, *shape: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure of so many pixels, and its axes."""
    drawn = Figure((width / 72, height / 72), layout="constrained")
    return drawn, drawn.subplots(*shape, **options)


def svg(drawn: Figure) -> str:
    """Return the text of a figure, its numbers rounded to a tenth of a pixel and its colours for two themes."""
    out = StringIO()
    drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    pairs = [(kind, a, b) for a, b in zip(COLOURS, DARK, strict=True) for kind in ("fill", "stroke")]
    dark = "".join(f'[style*="{kind}: {a}"]{{{kind}:{b}!important}}' for kind, a, b in pairs)
    text = out.getvalue().replace("</style>", f"@media(prefers-color-scheme:dark){{{dark}}}</style>", 1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"-?\d+\.\d+(?=[^<>]*>)", lambda m: f"{round(float(m[0]), 1):g}", text)  # in tags, not in words
    return re.sub(r"\s*\n\s*", "\n", text.replace("'DejaVu Sans'", "sans-serif"))


# -- from the formats and from measured tables

BARS = (
    ("torch.optim, fp32", "fp32", 4.0), ("bf16_sr", "bf16_sr", 2.0), ("int8_split24", "int8_split24", 2.0),
    ("the same, gradients released", "int8_split24", 0.0), ("int5_split24, released", "int5_split24", 0.0),
    ("int4_split24, released", "int4_split24", 0.0), ("int5_factored_split24, released", "int5_factored_split24", 0.0),
)  # fmt: skip
"""A label, the plan, and the bytes of a gradient element that a step holds."""


def memory() -> Figure:
    """Draw the bytes per parameter of a training step of AdamW; parameters are fp32 under `fp32` and else bf16."""
    from optgen.driver import load
    from optgen.ops import dtypes

    adamw = load.find_spec("adamw")
    states = adamw.present({f.name: f.default for f in adamw.flags})
    drawn, ax = figure(640, 270)
    for label, plan, gradient in BARS:
        found = load.find_plan(plan).storage(states, dtypes.f32 if plan == "fp32" else dtypes.bf16, False)
        kept = sum(fmt.bytes_per_param for fmt in found.states.values())
        ends = np.cumsum([found.bytes_per_param - kept, kept, gradient])
        for start, end, colour in zip((0, *ends), ends, (BLUE, ORANGE, GREEN), strict=False):
            ax.barh(label, end - start, left=start, color=colour, height=0.7)
        ax.annotate(f"{ends[-1]:.4g}", (ends[-1], label), (6, 0), textcoords="offset points", va="center")
    for colour, name in ((BLUE, "weight"), (ORANGE, "states"), (GREEN, "gradient")):
        ax.barh(0, 0, color=colour, label=name)
    ax.legend(loc="lower right")
    ax.invert_yaxis()
    ax.set(title="AdamW: bytes per parameter in a training step", xlim=(0, 17))
    ax.grid(visible=False, axis="y")
    return drawn


def pareto() -> Figure:
    """Draw the error of AdamW's update over the bytes of both moments, for the measured plans and packages."""
    found = json.loads((BENCHMARKS / "formats.json").read_text(encoding="utf-8"))["found"]
    drawn, axes = figure(680, 720, 2, 1, sharex=True)
    for ax, beta2 in zip(axes, ("0.999", "0.95"), strict=True):
        points = sorted((x["bits"] / 8, x["recurrent"][beta2]["nmse"], x) for x in found)
        least = math.inf
        for size, error, x in points:
            best, least = error < least, min(error, least)
            colour = ORANGE if x["peer"] else GREEN if best else BLUE
            ax.plot(size, error, "s" if x["peer"] else "o", color=colour, markersize=7)
        names: list[tuple[float, float, bool]] = []  # where names begin, decades below one another
        for size, error, x in sorted(points, key=lambda point: -point[1]):
            # a name stands on the left where a mark is close on the right
            left = any(1.001 < at / size < 1.06 and abs(math.log10(other / error)) < 0.25 for at, other, _ in points)
            near = [at for other, at, side in names if side == left and abs(math.log(other / size)) < 0.25]
            level = min([math.log10(error), *(at - 0.17 for at in near)])
            names.append((size, level, left))
            place = -6 if left else 6, 3 + 70 * (level - math.log10(error))  # a decade has about 70 points
            side = "right" if left else "left"
            ax.annotate(x["name"], (size, error), place, textcoords="offset points", fontsize=9.5, ha=side)
        ax.set(yscale="log", xscale="log", xlim=(0.5, 6), ylabel="error (NMSE)", title=f"AdamW, beta2 = {beta2}")
        ax.set_xticks([0.5, 0.75, 1, 1.5, 2, 3, 4], ["0.5", "0.75", "1", "1.5", "2", "3", "4"])
        ax.minorticks_off()
    for colour, mark, name in ((GREEN, "o", "no other has fewer bytes and less error"), (BLUE, "o", "other plans"),
                               (ORANGE, "s", "packages, by their own code")):  # fmt: skip
        axes[0].plot([], [], mark, color=colour, label=name)
    axes[0].legend(loc="upper right")
    axes[1].set_xlabel("bytes of both moments per parameter (fp32: 8)")
    return drawn


NAMED = [f"adamw.{plan}" for plan in ("fp32", "int8_split24", "flashoptim", "torchao8")] + ["lion.int8_split24"]


def kernels() -> Figure:
    """Draw the busiest pipe of each sweep, over the bytes that it moves, from kernels.json."""
    found = json.loads((BENCHMARKS / "kernels.json").read_text(encoding="utf-8"))
    at = found["columns"].index
    drawn, ax = figure(640, 380)
    for name, row in found["sweeps"].items():
        point = row[at("bytes")], max(row[at("issue") : at("LSU") + 1])
        ax.plot(*point, "o", color=BLUE if point[1] <= 100 else RED, markersize=7 if name in NAMED else 4)
        if name in NAMED:
            paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 0, "alpha": 0.8}
            ax.annotate(name, point, (8, -3), textcoords="offset points", fontsize=9.5, bbox=paper)
    ax.axhline(100, color=INK, linewidth=1)
    ax.set(title="Busiest pipe, % of the time that an H200's memory takes (predicted)", ylim=(0, None), xlim=(0, 33))
    ax.set(xlabel="bytes that a sweep loads and stores per parameter")
    return drawn


def training() -> Figure:
    """Draw the differences of losses to fp32 with their 95 % intervals, paired by seed, from training.json."""
    from docs.tools import train_rules as t

    kept = json.loads(t.RECORD.read_text(encoding="utf-8"))
    titles = {"rules": f"rules, int8_split24, {t.STEPS['fixed']} steps", "plans": f"AdamW, {t.STEPS['fixed']} steps"}
    titles["tuned"] = f"matrix rules, SAM, Sophia, {t.STEPS['tuned']} steps"
    parts = {titles[name]: verdicts for name, verdicts in t.parts(kept).items()}
    drawn, axes = figure(680, 60 + 21 * sum(map(len, parts.values())), 3, 1, sharex=True,
                         height_ratios=[len(v) + 1.5 for v in parts.values()])  # fmt: skip
    for ax, (title, verdicts) in zip(axes, parts.items(), strict=True):
        intervals(ax, title, verdicts)
    axes[-1].set_xlabel("loss minus that of fp32, nats per byte")
    return drawn


def frozen() -> Figure:
    """Draw predicted and measured shares of weights that a step leaves as they are, over the rate, from frozen.json."""
    kept = json.loads((BENCHMARKS / "frozen.json").read_text(encoding="utf-8"))
    drawn, ax = figure(640, 340)
    names = dict.fromkeys(x["task"] for x in kept["found"])
    for task, colour, mark in zip(names, (BLUE, ORANGE, GREEN), "os^", strict=True):
        rows = [x for x in kept["found"] if x["task"] == task]
        rates = [x["lr"] for x in rows]
        ax.plot(rates, [x["weights"] for x in rows], mark, color=colour, label=f"{task}, measured")
        ax.plot(rates, [x["predicted"] for x in rows], "-", color=colour, label="predicted")
    ax.set(xscale="log", title="AdamW in bf16: weights that a step leaves as they are", xlabel="learning rate")
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.legend(loc="lower left", fontsize=9.5)
    return drawn


def intervals(ax: Any, title: str, verdicts: Sequence[Any]) -> None:
    """Draw the paired differences of train_rules' verdicts, one a line."""
    for v in verdicts:
        mean, half = v.gap
        colour = RED if mean > half else GREEN if -mean > half else BLUE
        ax.errorbar(mean, v.rule, xerr=half, fmt="o", capsize=3, color=colour)
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.invert_yaxis()
    ax.set(title=title)


def evidence() -> Figure:
    """Draw the same of the tasks of evidence.json."""
    from docs.tools import evidence as e

    runs = json.loads(e.RECORD.read_text(encoding="utf-8"))["runs"]
    drawn, axes = figure(760, 720, 2, 2)
    for k, (ax, task) in enumerate(zip(axes.flat, e.TASKS, strict=True)):
        intervals(ax, f"{task.name}, {task.steps} steps", e.compared(runs[task.name]))
        ax.tick_params(labelleft=k % 2 == 0)
        ax.locator_params(axis="x", nbins=6)
    drawn.supxlabel("loss minus that of fp32, nats", fontsize=11)
    return drawn


DASHES = {"fp32": "-", "int8_split24": "--", "int4_split24": ":"}
FLOOR = 0.005  # nats
TRAINED = {"AdamW": BLUE, "Lion": ORANGE, "CAME": GREEN, "Muon": RED, "SOAP": PURPLE}


def curves() -> Figure:
    """Draw losses along the runs of evidence.json and training.json that have them, as means over seeds.

    A point is also the mean of as many of the record's as leave about 15 of them; FLOOR is where an axis ends.
    """
    from docs.tools import evidence as e
    from docs.tools import train_rules as t

    runs = json.loads(e.RECORD.read_text(encoding="utf-8"))["runs"]
    kept = json.loads(t.RECORD.read_text(encoding="utf-8"))
    parts = [(f"{task.name}, training loss", e.RULES, runs[task.name], 4, e.WINDOW) for task in e.TASKS]
    parts.append(("the demo's model, validation loss", t.TUNED, kept["tuned"], 2, t.STEPS["tuned"] // 8))
    drawn, axes = figure(760, 880, 3, 2)
    for ax, (title, rules, found, head, every) in zip(axes.flat, parts, strict=False):
        for rule in (rule for rule in rules if rule.name in TRAINED):
            lr, _ = t.rate_found(rule, found)
            plans = [plan for plan in DASHES if plan in ("fp32", *rule.plans)]
            keys = ([t.key_of(rule.name, plan, seed, lr) for plan in plans] for seed in range(6))
            seeds = [[found.get(key, ())[head:] for key in row] for row in keys]
            for plan, losses in zip(plans, np.mean([row for row in seeds if all(row)], 0), strict=True):
                some = max(1, len(losses) // 15)
                points = losses.reshape(-1, some).mean(1)
                points[points < FLOOR] = np.nan
                at = every * some * np.arange(1, 1 + len(points))
                ax.plot(at, points, DASHES[plan], color=TRAINED[rule.name])
        ax.set(title=title, yscale="log" if ax.dataLim.y1 > 10 * ax.dataLim.y0 else "linear")
        ax.yaxis.set_major_formatter("{x:g}")
    for name, colour in TRAINED.items():
        axes[2, 1].plot([], [], color=colour, label=name)
    for plan, dash in DASHES.items():
        axes[2, 1].plot([], [], dash, color=INK, label=plan)
    axes[2, 1].legend(loc="center")
    axes[2, 1].set_axis_off()
    drawn.supxlabel("step", fontsize=11)
    return drawn


def language_model() -> Figure:
    """Draw training losses of one seed of language_model.json, and all differences to fp32 with their means."""
    from docs.tools import language_model as model

    kept = model.load()
    rules = [(r, lr) for r, lr, _ in model.found_rates(kept) if model.pairs(kept, r.name, "fp32", lr)]
    if not rules:
        raise SystemExit(f"draw: {model.RECORD} has no run yet")
    drawn, axes = figure(760, 560, 2, len(rules), sharex=True, sharey="row", squeeze=False)
    colours = {model.CONTROL: INK, "int8_split24": BLUE, "int4_split24": ORANGE, "flashoptim": GREEN}
    for (top, below), (rule, lr) in zip(axes.T, rules, strict=True):
        for plan, colour in {"fp32": RED, **colours}.items():
            if found := model.pairs(kept, rule.name, plan, lr):
                losses = np.array([[run["train"] for run in both] for both in found])
                points = losses.reshape(len(found), 2, -1, model.EVERY // model.WINDOW).mean(3)
                at, change = model.EVERY * np.arange(1, 1 + points.shape[2]), points[:, 1] - points[:, 0]
                top.plot(at, points[0, 1], color=colour)
                below.plot(at, change.T, color=colour, alpha=0.3, linewidth=1)
                below.plot(at, change.mean(0), color=colour, label=plan)
        top.set(title=f"{rule.name}: training loss of one seed")
        below.set(title="minus fp32, same seeds and batches", xlabel="step")
    drawn.supylabel("nats per token", fontsize=11)
    drawn.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn


# -- from runs of AdamW on gradients of which the true moments are known

STREAM = 5000  # steps


def stored(plan: Any, at: Sequence[int], change: bool = True) -> Iterator[tuple[float, float, float]]:
    """Yield the errors at some steps of AdamW.

    The NMSE of the update, the median of exp_avg_sq over the true one where gradients shrink to a fifth or less, and
    the mean square of the relative error of its root. Gradients are normal, (64, 64), with a mean of 0.3 of their
    deviation: lognormal over elements (a factor of 2 either way), with `change` drawn anew after a quarter of the run.
    """
    import optgen

    random = torch.Generator().manual_seed(0)
    size, later = (torch.randn(64, 64, generator=random).mul(0.7).exp() for _ in "12")
    shrinks = later < size / 5
    p = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = optgen.compile("adamw", plan=plan.but(small_numel=0, name=f"{plan.name}_drawn"))([p], lr=0.0)
    m = v = torch.zeros(64, 64, dtype=torch.float64)
    for t in range(1, at[-1] + 1):
        if change and t == at[-1] // 4:
            size = later
        p.grad = size * (torch.randn(64, 64, generator=random) + 0.3)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * p.grad.double(), 0.999 * v + 0.001 * p.grad.double().square()
        if t in at:
            kept = optimizer.dense_state_dict()["state"][0]
            first, second = kept["exp_avg"].double(), kept["exp_avg_sq"].double()
            eps = 1e-8 * math.sqrt(1 - 0.999**t)
            want, got = m / (v.sqrt() + eps), first / (second.sqrt() + eps)
            nmse = (got - want).square().sum() / want.square().sum()
            ratio = second / v
            yield float(nmse), float(ratio[shrinks].median()), float((ratio.sqrt() - 1).square().mean())


def plan_of(name: str) -> Any:
    from specs import plans

    return getattr(plans, name)


def freeze() -> Figure:
    """Draw the second moment of elements whose gradients shrink, as plans keep it, over the true one."""
    drawn, ax = figure(640, 340)
    at = range(STREAM // 100, STREAM + 1, STREAM // 100)
    dashes = {"int8_rn_split24": "-", "flashoptim": "-.", "bnb8": "--", "bf16": ":", "int8_split24": "-"}
    for name, dash in dashes.items():
        ax.plot(at, [ratio for _, ratio, _ in stored(plan_of(name), at)], dash, label=name)
    ax.axvline(STREAM // 4, color=INK, linewidth=0.8)
    ax.set(yscale="log", title="Second moment as kept, over the true one", ylabel="median of elements")
    ax.set_xlabel("step (at the line, gradients of these elements shrink to a fifth or less)")
    ax.legend(loc="upper left")
    return drawn


def length() -> Figure:
    """Draw the error of the update over the length of a run."""
    drawn, ax = figure(640, 400)
    at = sorted({round(10 ** (k / 4)) for k in range(4, 17)})
    for k, name in enumerate(("int8_rn_split24", "flashoptim", "bnb8", "bf16_sr", "int4_split24", "int8_split24")):
        errors = [nmse for nmse, _, _ in stored(plan_of(name), at, False)]
        ax.plot(at, errors, "os^vDP"[k] + "-", markersize=4, label=name)
    ax.set(xscale="log", yscale="log", title="Error of AdamW's update over the length of a run")
    ax.set(xlabel="step", ylabel="error (NMSE)")
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def rounding() -> Figure:
    """Draw the error of a second moment, rounded to nearest and stochastically, after one step and after many."""
    drawn, axes = figure(640, 320, 1, 2, sharey=True)
    bits = {"8": "int8_split24", "6": "int6_split24", "5": "int5_split24", "4": "int4_split24"}
    found: dict[str, list[list[float]]] = {"nearest": [], "stochastic": []}
    for name in bits.values():
        for how, rows in found.items():
            plan = plan_of(name)
            plan = plan.but(name=f"{name}_{how}", nonneg=plan.nonneg.rounded(how), discouraged="drawn")
            rows.append([square for _, _, square in stored(plan, (1, STREAM))])
    for k, (ax, title) in enumerate(zip(axes, ("stored once", f"stored {STREAM:,} times"), strict=True)):
        for how, mark in (("nearest", "o-"), ("stochastic", "s-")):
            ax.plot(list(bits), [row[k] for row in found[how]], mark, label=how, color=RED if mark == "o-" else BLUE)
        ax.set(yscale="log", title=title, xlabel="bits")
    axes[0].set_ylabel("squared relative error")
    axes[0].legend(loc="upper left")
    return drawn


def singular() -> Figure:
    """Draw which singular directions of a momentum Muon's step keeps, for a momentum in few bits."""
    import optgen

    rows = 256
    random = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(rows, rows, generator=random, dtype=torch.float64))[0] for _ in "lr")
    values = 1e-3 / torch.arange(1, rows + 1, dtype=torch.float64)
    momentum = (left * values) @ right.T
    drawn, (top, below) = figure(640, 520, 2, 1, sharex=True)
    top.plot(range(1, rows + 1), values, color=INK, label="true")
    for name in ("int8_split24", "int6_split24", "int5_split24", "int4_split24"):
        p = torch.nn.Parameter(torch.zeros(rows, rows))
        optimizer = optgen.compile("muon", plan=plan_of(name))([p], lr=0.0)
        p.grad = torch.zeros(rows, rows)
        optimizer.step()
        saved = optimizer.dense_state_dict()
        saved["state"][0]["momentum_buffer"] = momentum.float()
        optimizer.load_state_dict(saved)
        kept = optimizer.dense_state_dict()["state"][0]["momentum_buffer"].double()
        u, s, v = torch.linalg.svd(kept)
        step = torch.einsum("ik,ij,jk->k", left, u @ v, right)
        window = torch.ones(9, dtype=torch.float64) / 9
        top.plot(range(1, rows + 1), s, label=name.removesuffix("_split24"))
        below.plot(range(5, rows - 3), torch.nn.functional.conv1d(step[None, None], window[None, None])[0, 0])
    top.set(yscale="log", title="Singular values of the momentum, true and as kept")
    below.set(title="Part of Muon's step along the true direction (mean of 9)")
    below.set_xlabel("singular value, from the largest")
    top.legend(loc="upper right", ncols=2)
    return drawn


def transfer() -> Figure:
    """Draw losses over learning rates at four widths, without scale= and with it, from transfer.json."""
    from docs.tools import transfer as t

    drawn, axes = figure(640, 300, 1, 2, sharex=True, sharey=True)
    for ax, way, title in zip(axes, t.WAYS, ("one rate for all", 'scale="mup"'), strict=True):
        for width, mark in zip(t.WIDTHS, "os^D", strict=True):
            at = t.losses(way, width)
            ax.plot(list(at), list(at.values()), mark + "-", markersize=4, label=f"width {width}")
        ax.set(xscale="log", title=title, xlabel="learning rate")
    axes[0].set_ylabel("loss, nats per byte")
    axes[0].legend(loc="upper right")
    return drawn


def lightbench() -> Figure:
    """Draw the steps in which five rules pass LightBench's tasks under nine storages, from lightbench.json."""
    from docs.tools import lightbench as l

    cells = json.loads(l.RECORD.read_text(encoding="utf-8"))["cells"]
    tasks = [f"{task.name}-{level}" for task in l.TASKS for level in task.levels]
    kinds = {GREEN: "at fp32's rate, in at most 1.1 times its steps", BLUE: "at fp32's rate, in more steps",
             ORANGE: "at another rate only", RED: "not passed", GRID: "not passed in fp32, others not run"}  # fmt: skip
    drawn, axes = figure(1060, 110 + 17 * len(tasks), 1, len(l.RULES), sharey=True)
    for ax, rule in zip(axes, l.RULES, strict=True):
        places: dict[str, list[tuple[int, int]]] = {kind: [] for kind in kinds}
        for (y, task), (x, plan) in product(enumerate(tasks), enumerate(l.PLANS)):
            (best, at), (steps, lr) = (cells.get(f"{task}, {rule}, {p}", (0, 0, 0))[:2] for p in ("fp32", plan))
            kind = RED if not steps else ORANGE if lr != at else GREEN if steps <= 1.1 * best else BLUE
            places[kind if best and f"{task}, {rule}, {plan}" in cells else GRID].append((x, y))
            if steps and (plan == "fp32" or kind != GREEN):
                ax.text(x, y, steps, color=PAPER, fontsize=8, ha="center", va="center_baseline")
        for kind, at in places.items():
            ends = [(x + half, y) for x, y in at for half in (-0.38, 0.38, math.nan)]
            ax.plot(*np.reshape(ends, (-1, 2)).T, color=kind, linewidth=14, solid_capstyle="butt", label=kinds[kind])
        ax.set_xticks(range(len(l.PLANS)), l.PLANS, rotation=90, fontsize=9)
        ax.set_yticks(range(len(tasks)), tasks, fontsize=9)
        ax.set(title=rule, xlim=(-0.5, len(l.PLANS) - 0.5), ylim=(len(tasks) - 0.5, -0.5))
        ax.grid(visible=False)
        ax.tick_params(left=False, bottom=False)
    drawn.legend(handles=axes[0].lines, loc="outside lower center", ncols=3)
    return drawn


PICTURES: dict[str, Callable[[], Figure]] = {
    "memory": memory, "pareto": pareto, "training": training, "evidence": evidence, "curves": curves, "frozen": frozen,
    "kernels": kernels, "freeze": freeze, "length": length, "rounding": rounding, "singular": singular,
    "transfer": transfer, "lightbench": lightbench, "language_model": language_model,
}  # fmt: skip


def draw(name: str) -> str:
    """Return the text of a picture."""
    with mpl.rc_context(STYLE):
        return svg(PICTURES[name]())


def write(name: str) -> None:
    """Draw a picture into its file."""
    (IMAGES / f"{name}.svg").write_text(draw(name), encoding="utf-8")
    print(f"docs/images/{name}.svg", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")
    for name in sys.argv[1:] or PICTURES:
        write(name)
