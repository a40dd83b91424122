"""Measure the errors that every plan makes in AdamW's states and updates, on gradients of real models.

    python -m docs.tools.sweep_formats                      writes docs/benchmarks/formats.md and .json
    python -m docs.tools.sweep_formats --plans int8 int4    only these
    python -m docs.tools.sweep_formats --quick              short streams: everything runs, the numbers say little
    python -m docs.tools.sweep_formats --data streams.pt    keeps the streams in a file, or takes them from there
    python -m docs.tools.sweep_formats --range              only the part on other seeds, lengths and sizes, anew

Plans are those of specs/plans.py, by name; what keeps no states below fp32 and what keeps them as another plan does is
left out.  They are measured through generated AdamW kernels and the optimizer's own loading and reading of states, with
every tensor stored as the plan says however small it is.  bitsandbytes and torchao, where they are installed, are
measured through their own functions, in a loop that decodes, updates and encodes as their optimizers do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from docs.tools.format_streams import Data, Part, collect
from tools.prose import filled, table

# Discouraged plans are measured on purpose.
warnings.filterwarnings("ignore", r"\w+: plan '\w+' is discouraged")

ROOT = Path(__file__).resolve().parents[2]
STEPS, QUICK_STEPS = 2000, 120
BETA1, BETAS2 = 0.9, (0.999, 0.95)
EPS = 1e-8
SCALES = (1e-4, 1e-2, 1e4)
"""Factors of gradients and of eps: Adam's steps do not change, so neither may its states."""

POINTS = 20
"""Steps at which the kept states are read, the last one among them."""

DEAD = 8
"""One element in so many loses its gradient, a quarter into the stream."""

BASELINE = "flashoptim"

RANGED = (BASELINE, "int8_split24", "int6_split24")
SEEDS, LENGTHS, SIZES = (0, 1), (0.05, 0.15, 0.5, 1.0), (1e-2, 1.0, 1e2, 1e4)
"""Seeds of streams, parts of their steps, factors of gradients and of eps: the settings of `--range`."""

Read = Callable[[], tuple[Tensor, Tensor]]


# -- what is measured


@dataclass(frozen=True)
class Trace:
    """A run over a stream: states at some steps, (points, elements), and what the weights were moved by."""

    steps: tuple[int, ...]
    first: Tensor
    second: Tensor
    moved: Tensor
    later: Tensor  # of `moved`, what came after a quarter of the stream


def points_of(steps: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(steps * (i + 1) / POINTS)) for i in range(POINTS)}))


def exactly(gradients: Tensor, beta2: float, eps: float) -> Trace:
    """Compute Adam in fp64, by its formulas."""
    steps, numel = gradients.shape
    m, v, moved, early = (torch.zeros(numel, dtype=torch.float64) for _ in range(4))
    points, first, second = points_of(steps), [], []
    for t in range(1, steps + 1):
        g = gradients[t - 1].double()
        m.mul_(BETA1).add_(g, alpha=1 - BETA1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        moved += update(m, v, t, beta2, eps)
        if t == steps // 4:
            early.copy_(moved)
        if t in points:
            first.append(m.clone())
            second.append(v.clone())
    return Trace(points, torch.stack(first), torch.stack(second), moved, moved - early)


def update(m: Tensor, v: Tensor, step: int, beta2: float, eps: float) -> Tensor:
    """Return Adam's step of size 1."""
    return m / (1 - BETA1**step) / ((v / (1 - beta2**step)).sqrt() + eps)


class Product:
    """AdamW under a plan, its weights fp32 and 0 at first, all tensors stored as the plan says."""

    def __init__(self, plan: str, parts: Sequence[Part], numel: int, beta2: float, eps: float) -> None:
        import optgen

        self.weights, self.gradient = torch.zeros(numel), torch.zeros(numel)
        self.parts = parts
        params = [torch.nn.Parameter(part.of(self.weights)) for part in parts]
        for p, part in zip(params, parts, strict=True):
            p.grad = part.of(self.gradient)
        cls = optgen.compile("adamw", plan=for_every_size(plan))
        self.optimizer = cls(params, lr=1.0, betas=(BETA1, beta2), eps=eps, weight_decay=0.0)

    def step(self, gradient: Tensor) -> None:
        self.gradient.copy_(gradient)
        self.optimizer.step()

    def read(self) -> tuple[Tensor, Tensor]:
        """The kept states as fp64."""
        dense = self.optimizer.dense_state_dict()["state"]
        out = torch.zeros(2, len(self.weights), dtype=torch.float64)
        for i, part in enumerate(self.parts):
            part.of(out)[0], part.of(out)[1] = dense[i]["exp_avg"], dense[i]["exp_avg_sq"]
        return out[0], out[1]

    def load(self, first: Tensor, second: Tensor, step: int) -> None:
        """Encode these states, to nearest, as a checkpoint's."""
        saved = self.optimizer.dense_state_dict()
        of = {"step": torch.tensor(float(step))}
        saved["state"] = {
            i: {**of, "exp_avg": part.of(first).clone(), "exp_avg_sq": part.of(second).clone()}
            for i, part in enumerate(self.parts)
        }
        self.optimizer.load_state_dict(saved)


def for_every_size(name: str) -> Any:
    """Return the plan with small tensors stored like others, and without a verdict of the lint."""
    from optgen.formats import Plan
    from specs import plans

    plan: Plan = getattr(plans, name)
    return Plan(
        plan.doc, name=f"{name}_every_size", master=plan.master, signed=plan.signed, nonneg=plan.nonneg,
        initial=plan.initial, small_numel=0, overrides=plan.overrides,
        discouraged=plan.discouraged or "measured",
    )  # fmt: skip


class Peer:
    """Another package's storage: a function that stores a flat tensor and reads it back, for each moment."""

    def __init__(self, codec: Callable[[Tensor, bool], Tensor], numel: int, beta2: float, eps: float) -> None:
        self.codec, self.beta2, self.eps, self.steps = codec, beta2, eps, 0
        self.weights, self.first, self.second = (torch.zeros(numel) for _ in range(3))

    def step(self, gradient: Tensor) -> None:
        self.steps += 1
        self.first = BETA1 * self.first + (1 - BETA1) * gradient
        self.second = self.beta2 * self.second + (1 - self.beta2) * gradient * gradient
        self.weights -= update(self.first, self.second, self.steps, self.beta2, self.eps)
        self.load(self.first, self.second, self.steps)

    def read(self) -> tuple[Tensor, Tensor]:
        return self.first.double(), self.second.double()

    def load(self, first: Tensor, second: Tensor, step: int) -> None:
        self.steps = step
        self.first, self.second = self.codec(first, True), self.codec(second, False)


def peers() -> dict[str, tuple[str, float, Callable[[Tensor, bool], Tensor]]]:
    """Return name -> (version, bits of both states per parameter, codec) of the packages that are installed."""
    found: dict[str, tuple[str, float, Callable[[Tensor, bool], Tensor]]] = {}
    version = importlib.metadata.version
    try:
        import bitsandbytes.functional as bnb

        maps = {signed: bnb.create_dynamic_map(signed=signed) for signed in (True, False)}

        def blockwise(x: Tensor, signed: bool) -> Tensor:
            codes, state = bnb.quantize_blockwise(x, code=maps[signed], blocksize=256)
            out: Tensor = bnb.dequantize_blockwise(codes, state)
            return out

        found["bitsandbytes 8-bit"] = version("bitsandbytes"), 2 * (8 + 32 / 256), blockwise
    except ImportError:
        pass
    try:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8

        def kept(make: Callable[[torch.Size, bool], Any]) -> Callable[[Tensor, bool], Tensor]:
            def codec(x: Tensor, signed: bool) -> Tensor:
                stored = make(x.shape, signed)
                stored.copy_(x)
                out: Tensor = stored.dequantize()
                return out

            return codec

        for name, bits, block, make in (
            ("8-bit", 8, 256, lambda shape, signed: OptimState8bit.zeros(shape, signed, 256)),
            ("fp8", 8, 256, lambda shape, signed: OptimStateFp8.zeros(shape, 256)),
            ("4-bit", 4, 128, lambda shape, signed: OptimState4bit.zeros(shape, signed, 128)),
        ):
            found[f"torchao {name}"] = version("torchao"), 2 * (bits + 32 / block), kept(make)
    except ImportError:
        pass
    return found


def run(kept: Product | Peer, gradients: Tensor, scale: float, dead: Tensor | None = None) -> Trace:
    """Step over the gradients of the stream, times `scale`; those of `dead` elements end a quarter into it."""
    steps = len(gradients)
    points, first, second = points_of(steps), [], []
    early = torch.zeros_like(kept.weights)
    for t in range(1, steps + 1):
        g = gradients[t - 1] * scale
        if dead is not None and t > steps // 4:
            g = g.masked_fill(dead, 0.0)
        kept.step(g)
        if t == steps // 4:
            early.copy_(kept.weights)
        if t in points and dead is None:
            m, v = kept.read()
            first.append(m)
            second.append(v)
    none = torch.empty(0)
    read = (torch.stack(first), torch.stack(second)) if first else (none, none)
    return Trace(points, *read, -kept.weights.double(), (early - kept.weights).double())


# -- what is said of it


@dataclass(frozen=True)
class Errors:
    """Errors of the update that is made of stored states, compared with that of exact ones.

    nmse         sum of squared errors over sum of squares, geometric mean over tensors
    worst        of the tensors, where
    median, p99  of the relative error of an element
    zeros        second moments that read as 0 and are not
    impossible   updates beyond what any gradients could make, by the Cauchy-Schwarz inequality, by more than 1 %
    flips        updates of the other sign
    first        NMSE of the first moment alone
    broken       elements that are not finite
    gain         what the weights were moved by, along the way they should have been moved (1: as far)
    """

    nmse: float
    worst: float
    worst_tensor: str
    median: float
    p99: float
    zeros: int
    impossible: int
    flips: int
    first: float
    broken: int
    gain: float = math.nan


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(x, 1e-30)) for x in values))


def errors(
    parts: Sequence[Part], kept: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], steps: Sequence[int], beta2: float,
    eps: float,
) -> Errors:  # fmt: skip
    """States as (points, elements), fp64."""
    (m, v), (m0, v0) = kept, true
    made = torch.stack([update(m[i], v[i], t, beta2, eps) for i, t in enumerate(steps)])
    want = torch.stack([update(m0[i], v0[i], t, beta2, eps) for i, t in enumerate(steps)])
    squares, of_first = {}, []
    for part in parts:
        x, y = part.of(made), part.of(want)
        size = float(y.square().sum())
        if size > 0:
            squares[part.name] = float((x - y).square().sum()) / size
            a, b = part.of(m), part.of(m0)
            of_first.append(float((a - b).square().sum() / b.square().sum()))
    worst = max(squares, key=lambda k: squares[k] if math.isfinite(squares[k]) else math.inf)
    live = want != 0
    relative = ((made - want).abs() / want.abs())[live]
    middle, most = (float(relative.kthvalue(max(1, round(q * len(relative))))[0]) for q in (0.5, 0.99))
    bound = (1 - BETA1) / math.sqrt((1 - beta2) * (1 - BETA1**2 / beta2)) * 1.01
    ratio = (m / v.sqrt()).abs()
    return Errors(
        nmse=geometric_mean(list(squares.values())) if all(map(math.isfinite, squares.values())) else math.inf,
        worst=squares[worst],
        worst_tensor=worst,
        median=middle,
        p99=most,
        zeros=int(((v == 0) & (v0 > 0)).sum()),
        impossible=int(((ratio > bound) & (m != 0)).sum()),
        flips=int((m * m0 < 0).sum()),
        first=geometric_mean(of_first),
        broken=int((~made.isfinite()).sum()),
    )


def gain(parts: Sequence[Part], moved: Tensor, true: Tensor) -> float:
    """Return the mean over tensors of the movement along the true one, over its length."""
    shares = []
    for part in parts:
        x, y = part.of(moved), part.of(true)
        size = float(y.square().sum())
        if size > 0:
            shares.append(float((x * y).sum()) / size)
    return statistics.fmean(shares)


# -- one subject after another


@dataclass(frozen=True)
class Subject:
    """A plan, or a peer's storage."""

    name: str
    bits: float
    what: str
    peer: bool = False


def subjects() -> list[Subject]:
    """Return every plan whose states have formats of their own, then the peers."""
    from optgen.driver import targets
    from optgen.formats import Plan
    from optgen.ops import dtypes
    from specs import adamw, plans

    spec = adamw.adamw
    flags = {f.name: f.default for f in spec.flags}
    recurrences = targets.recurrences_of(spec, tuple(sorted(flags.items())))
    seen, out = set(), []
    for name, plan in vars(plans).items():
        if not isinstance(plan, Plan):
            continue
        storage = plan.storage(spec.present(flags), dtypes.f32, False, recurrences)
        formats = tuple(storage.states.values())
        bits = 8 * (storage.bytes_per_param - 4)
        if bits < 64 and formats not in seen:
            out.append(Subject(name, bits, "; ".join(map(str, formats))))
        seen.add(formats)
    return out + [Subject(name, bits, version, True) for name, (version, bits, _) in peers().items()]


def maker(subject: Subject, parts: Sequence[Part], numel: int) -> Callable[[float, float], Product | Peer]:
    if subject.peer:
        codec = peers()[subject.name][2]
        return lambda beta2, eps: Peer(codec, numel, beta2, eps)
    return lambda beta2, eps: Product(subject.name, parts, numel, beta2, eps)


def dead_elements(numel: int) -> Tensor:
    return torch.arange(numel) % DEAD == DEAD - 1


def measure(subject: Subject, data: Path, truths: Path, whole: bool) -> dict[str, Any]:
    """Measure one subject; `whole`: also where gradients end, and at other scales of gradients."""
    torch.set_num_threads(1)
    start = time.monotonic()
    found, true = Data.load(data), torch.load(truths, weights_only=False, mmap=True)
    out: dict[str, Any] = {**asdict(subject), "recurrent": {}, "dead": {}, "scaled": {}}
    once = maker(subject, found.parts, len(found.states[0].first))(BETAS2[0], EPS)
    kept = []
    for states in found.states:
        once.load(states.first, states.second, states.step)
        kept.append(once.read())
    steps = [s.step for s in found.states]
    pair = torch.stack([m for m, _ in kept]), torch.stack([v for _, v in kept])
    exact = tuple(torch.stack([getattr(s, x) for s in found.states]).double() for x in ("first", "second"))
    out["once"] = asdict(errors(found.parts, pair, exact, steps, BETAS2[0], EPS))
    make = maker(subject, found.rows, found.gradients.shape[1])
    for beta2 in BETAS2:
        for scale in (1.0, *(SCALES if whole else ())):
            trace = run(make(beta2, EPS * scale), found.gradients, scale)
            exact = true[beta2]
            # Back to the stream's own scale, so that all of them are compared with the same numbers.
            pair = trace.first / scale, trace.second / scale**2
            said = errors(found.rows, pair, (exact.first, exact.second), exact.steps, beta2, EPS)
            said = Errors(**{**asdict(said), "gain": gain(found.rows, trace.moved, exact.moved)})
            if scale == 1.0:
                out["recurrent"][str(beta2)] = asdict(said)
            else:
                out["scaled"].setdefault(str(beta2), {})[f"{scale:g}"] = {"nmse": said.nmse, "gain": said.gain}
        if whole:
            dead = dead_elements(found.gradients.shape[1])
            trace = run(make(beta2, EPS), found.gradients, 1.0, dead)
            there = torch.zeros_like(dead)
            for part in found.rows:
                part.of(there).fill_(True)
            moved, exact_moved = trace.later[dead & there], true[beta2, "dead"].later[dead & there]
            out["dead"][str(beta2)] = {
                "rms": float(moved.square().mean().sqrt()), "most": float(moved.abs().max()),
                "true_rms": float(exact_moved.square().mean().sqrt()), "true_most": float(exact_moved.abs().max()),
            }  # fmt: skip
    out["seconds"] = round(time.monotonic() - start, 1)
    return out


def exact_runs(data: Data) -> dict[Any, Trace]:
    """Return beta2 -> the stream in fp64; (beta2, "dead") -> with gradients that end."""
    out: dict[Any, Trace] = {}
    steps, numel = data.gradients.shape
    ended = data.gradients.clone()
    ended[steps // 4 :, dead_elements(numel)] = 0.0
    for beta2 in BETAS2:
        out[beta2] = exactly(data.gradients, beta2, EPS)
        out[beta2, "dead"] = exactly(ended, beta2, EPS)
    return out


def ranges(seed: int, steps: int) -> dict[str, dict[str, list[list[float]]]]:
    """Return NMSE of u on the streams of a seed: plan -> beta2 -> for each of SIZES at each of LENGTHS."""
    torch.set_num_threads(1)
    data = collect(steps, seed)
    out: dict[str, dict[str, list[list[float]]]] = {plan: {} for plan in RANGED}
    for beta2 in BETAS2:
        exact = exactly(data.gradients, beta2, EPS)
        for plan in RANGED:
            found = out[plan][str(beta2)] = []
            for size in SIZES:
                trace = run(Product(plan, data.rows, data.gradients.shape[1], beta2, EPS * size), data.gradients, size)
                row = []
                for i in (round(x * len(trace.steps)) - 1 for x in LENGTHS):
                    kept = trace.first[i : i + 1] / size, trace.second[i : i + 1] / size**2
                    true = exact.first[i : i + 1], exact.second[i : i + 1]
                    row.append(errors(data.rows, kept, true, trace.steps[i : i + 1], beta2, EPS).nmse)
                found.append(row)
    return out


# -- the report


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2g}x" if b > 0 and math.isfinite(a) else "-"


def short(x: float) -> str:
    return f"{x:.2g}" if math.isfinite(x) else "not finite"


def markdown(found: Sequence[dict[str, Any]], data: dict[str, Any]) -> Iterator[str]:
    base = next((x for x in found if x["name"] == BASELINE), found[0])
    whole = [x for x in found if x["dead"]]
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    yield "# What storage formats do to AdamW's updates\n"
    yield f"""\
Gradients of two small models over {data["steps"]:,} steps (`docs/tools/format_streams.py`): the demo's language model
and a convolutional network, {data["elements"]:,} elements of {data["tensors"]} tensors (embeddings, attention,
perceptrons, convolutions, norms, biases, heads); states of all their elements at steps
{", ".join(map(str, data["dumps"]))}. Adam's update is u = m / (sqrt(v) + eps), bias corrected,
betas (0.9, 0.999) or (0.9, 0.95). *NMSE* is the sum of squared errors of u over its sum of squares, the geometric mean
over tensors; *x* beside it: over that of `{base["name"]}`.
*Bits* are those of both states, with scales. Every tensor is stored as the plan says, however small it is. Written by
`docs/tools/sweep_formats.py`; {versions}.

## Stored once

States of the fp32 run, encoded (to nearest, as when a checkpoint is loaded) and read back. *Worst*: the tensor with the
largest NMSE. *Median* and *p99* of an element's relative error (1: the update is gone). *Zeros*: second moments that
read as 0 and are not. *Impossible*: |m| / sqrt(v) over its Cauchy-Schwarz bound by more than 1 %.
"""
    head = ("", "bits", "NMSE of m", "NMSE of u", "x", "worst", "median", "p99", "zeros", "impossible")
    rows = []
    for x in found:
        e = x["once"]
        rows.append([
            x["name"], f"{x['bits']:.4g}", short(e["first"]), short(e["nmse"]), ratio(e["nmse"], base["once"]["nmse"]),
            short(e["worst"]), short(e["median"]), short(e["p99"]), f"{e['zeros']:,}", f"{e['impossible']:,}",
        ])  # fmt: skip
    yield from table(head, rows)
    yield f"""
## Stored at every step

The whole stream, states decoded, updated and encoded at each of {data["steps"]:,} steps, as training does; compared at
{POINTS} of them with Adam in fp64. *Gain*: how far the weights were moved along their true way, over its length, mean
over tensors. *Flips*: updates of the other sign, in a thousand."""
    for beta2 in BETAS2:
        yield f"\nbetas (0.9, {beta2:g}):\n"
        head = ("", "bits", "NMSE of u", "x", "worst", "where", "gain", "flips", "zeros", "impossible")
        rows = []
        for x in found:
            e = x["recurrent"][str(beta2)]
            rows.append([
                x["name"], f"{x['bits']:.4g}", short(e["nmse"]),
                ratio(e["nmse"], base["recurrent"][str(beta2)]["nmse"]), short(e["worst"]), e["worst_tensor"],
                f"{e['gain']:.3f}", f"{1000 * e['flips'] / (POINTS * data['elements']):.2f}", f"{e['zeros']:,}",
                f"{e['impossible']:,}",
            ])  # fmt: skip
        yield from table(head, rows)
    if "range" in data:
        yield from of_ranges(data["range"], data["steps"])
    yield "\n## Gradients of another size\n"
    yield "The same stream, and eps with it, times a number: Adam takes the same steps. NMSE of u (gain).\n"
    scales = [f"{s:g}" for s in SCALES]
    head = ("", *(f"x {s}, beta2 {b:g}" for b in BETAS2 for s in scales))
    rows = []
    for x in whole:
        cells = [x["scaled"][str(b)][s] for b in BETAS2 for s in scales]
        rows.append([x["name"], *(f"{short(c['nmse'])} ({c['gain']:.3g})" for c in cells)])
    yield from table(head, rows)
    yield "\n## Gradients that end\n"
    yield f"One element in {DEAD} gets no gradient any more after a quarter of the stream. What its weight moves from"
    yield "then on, in steps of size 1: root mean square (largest). In exact arithmetic: what is left of its"
    yield "momentum.\n"
    head = ("", *(f"beta2 {b:g}" for b in BETAS2))
    exact = [whole[0]["dead"][str(b)] for b in BETAS2] if whole else []
    rows = [["exact", *(f"{d['true_rms']:.3g} ({d['true_most']:.3g})" for d in exact)]]
    for x in whole:
        cells = [x["dead"][str(b)] for b in BETAS2]
        rows.append([x["name"], *(f"{d['rms']:.3g} ({d['most']:.3g})" for d in cells)])
    yield from table(head, rows)
    yield "\n## What they are\n"
    for x in found:
        yield f"- {x['name']}: {('the package, version ' if x['peer'] else '') + x['what']}"


def of_ranges(found: Sequence[dict[str, dict[str, list[list[float]]]]], steps: int) -> Iterator[str]:
    """Yield the table of `ranges` of several seeds."""
    seeds = ", ".join(map(str, SEEDS))
    yield f"""
## Other seeds, lengths and sizes of gradients

NMSE of u over that of `{BASELINE}` at one step: smallest and largest of the streams of seeds {seeds}. Gradients,
and eps with them, are times a number, which changes no step of Adam. {BASELINE} rounds to nearest, so that its error
grows along a run, and its fp16 scales lose small gradients; both make the factor smaller.
"""
    rows = []
    for plan, beta2, (i, size) in itertools.product(RANGED[1:], BETAS2, enumerate(SIZES)):
        own, base = ([run[name][str(beta2)][i] for run in found] for name in (plan, BASELINE))
        of_seeds = [[a / b for a, b in zip(x, y, strict=True)] for x, y in zip(own, base, strict=True)]
        cells = (f"{min(c):.2g} to {max(c):.2g}" for c in zip(*of_seeds, strict=True))
        rows.append([plan, f"{beta2:g}", f"{size:g}", *cells])
    yield from table(("", "beta2", "gradients x", *(f"step {round(x * steps):,}" for x in LENGTHS)), rows, (0,))


def document(found: Sequence[dict[str, Any]], data: dict[str, Any]) -> str:
    return filled("\n".join(markdown(found, data))) + "\n"


def sweep(data: Data, chosen: Sequence[Subject], jobs: int, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Return the results of `measure` for each, in order."""
    with tempfile.TemporaryDirectory() as folder:
        streams, truths = Path(folder) / "streams.pt", Path(folder) / "truths.pt"
        data.save(streams)
        torch.save(exact_runs(data), truths)
        found = []
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = [pool.submit(measure, x, streams, truths, not x.peer) for x in chosen]
            for x, future in zip(chosen, futures, strict=True):
                found.append(future.result())
                nmse = found[-1]["once"]["nmse"], *(e["nmse"] for e in found[-1]["recurrent"].values())
                say("   ".join([f"{x.name:<20} {x.bits:5.2f} bits", *map(short, nmse), f"{found[-1]['seconds']} s"]))
    return found


def main(given: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", nargs="*", default=[], help="plans, or peers, by name; none: all")
    parser.add_argument("--steps", type=int, help=f"length of the streams ({STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a file with the streams: read where it is, else written")
    parser.add_argument("--jobs", type=int, default=2, help="plans at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--range", action="store_true", help="only the streams of other seeds, lengths and sizes")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    record = asked.out / "formats.json"
    former: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if asked.range:
        with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            former["data"]["range"] = list(pool.map(ranges, SEEDS, [former["data"]["steps"]] * len(SEEDS)))
        write(asked.out, former["found"], former["data"])
        return 0
    every = subjects()
    unknown = set(asked.plans) - {x.name for x in every}
    if unknown:
        parser.error(f"--plans: expected some of {', '.join(x.name for x in every)}, got {', '.join(sorted(unknown))}")
    chosen = [x for x in every if not asked.plans or x.name in asked.plans]
    steps = asked.steps or (QUICK_STEPS if asked.quick else STEPS)
    if steps < 8:
        parser.error(f"--steps: expected at least 8, got {steps}")
    if asked.data is not None and asked.data.exists():
        data = Data.load(asked.data)
    else:
        data = collect(steps, asked.seed)
        if asked.data is not None:
            data.save(asked.data)
    told: dict[str, Any] = {
        "steps": len(data.gradients), "elements": sum(part.numel for part in data.rows), "tensors": len(data.rows),
        "dumps": [s.step for s in data.states], "seed": asked.seed,
        "versions": {"torch": torch.__version__, **{x.name: x.what for x in chosen if x.peer}},
    }  # fmt: skip
    found = sweep(data, chosen, asked.jobs, say)
    for x in found:
        x.pop("seconds", None)  # the only number that is another one each time
    if steps == former.get("data", {}).get("steps"):
        told |= {key: x for key, x in former["data"].items() if key == "range"}
    write(asked.out, found, told)
    return 0


def write(out: Path, found: Sequence[dict[str, Any]], data: dict[str, Any]) -> None:
    """Write the page and its numbers."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "formats.md").write_text(document(found, data), encoding="utf-8")
    kept = {"data": data, "found": found}
    (out / "formats.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
