"""Timing: contenders of one family beside each other, in a random order every round.

Two times are taken.  `device` is from CUDA events around one step, which the host hands over while the device is
still held up by a wait, so that no time of the host is in it.  `step` is the wall time of steps one after the other,
the larger of what the host and what the device need; `host` is when the last of these calls returned.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpu import contenders as field_of
from gpu.contenders import Contender, Copying, Runner
from gpu.machine import Clock, in_words
from gpu.shapes import Shapes, total
from optgen.runtime import launch

WARM_UP = 17
"""Steps before anything is timed: kernels that take the step count compile anew at steps 1, 2 and 16."""

COPY = "copy"
RESERVE = 0.10
"""Share of the memory left to temporaries and to the allocator's rounding."""


# Clocks ---------------------------------------------------------------------------------------------------------------


class Timer:
    """Seconds of steps on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cycles_per_second = self._calibrate() if device.type == "cuda" else 0.0

    def _calibrate(self) -> float:
        """Cycles of the device's wait per second, at the clocks under load."""
        cycles = 10_000_000
        for _ in range(50):  # an idle device takes a while to raise its clocks
            torch.cuda._sleep(cycles)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return cycles / (start.elapsed_time(end) / 1e3)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def on_device(self, step: Callable[[], None], host: float) -> float:
        """One step; `host`: seconds that the host takes for it, which the device waits for."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((1.5 * host + 1e-4) * self.cycles_per_second))
        first.record()
        step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def in_a_row(self, step: Callable[[], None], count: int) -> tuple[float, float]:
        """(wall seconds per step, of these until the last call returned) of `count` steps one after the other."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        called = time.perf_counter()
        self.synchronize()
        return (time.perf_counter() - start) / count, (called - start) / count


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median and quartiles.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    {'median': 3.0, 'q1': 2.0, 'q3': 4.0, 'n': 5}
    """
    scaled = [v * scale for v in values]
    q1, median, q3 = statistics.quantiles(scaled, n=4, method="inclusive") if len(scaled) > 1 else scaled * 3
    return {"median": median, "q1": q1, "q3": q3, "n": len(scaled)}


# Races ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A list of tensors to step, and how long."""

    name: str
    title: str
    shapes: Shapes
    rounds: int
    in_a_row: int = 0
    warm_up: int = WARM_UP
    copy_bytes: int = 2**31
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    @property
    def numel(self) -> int:
        return total(self.shapes)


@dataclass
class Times:
    """Seconds of one contender in each round of a batch."""

    device: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


Keep = Callable[[dict[str, Any]], None]
"""Takes a section of the report, as far as it has come."""


def race(
    plan: Plan,
    entrants: Sequence[Contender],
    timer: Timer,
    clock: Clock,
    reserve: float = 20.0,
    keep: Keep = lambda section: None,
) -> dict[str, Any]:
    """All families over one list of tensors.

    reserve   seconds that must be left for a batch to start
    keep      is given what is known after each batch: a later one may end the process
    """
    started = clock.elapsed
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    copies: list[float] = []
    section = {
        "title": plan.title,
        "tensors": len(plan.shapes),
        "elements": plan.numel,
        "copy_tb_s": None,
        "rows": rows,
        "left_out": left_out,
        "seconds": 0.0,
    }
    for family in dict.fromkeys(c.family for c in entrants):
        members = [c for c in entrants if c.family == family and c.dtype in plan.dtypes]
        if not members:
            continue
        try:
            memory = free_memory(timer.device) - 2 * plan.copy_bytes
        except Exception as error:  # of a device that is lost: what was measured before stays
            left_out.update((c.name, in_words(error)) for c in members)
            continue
        runs, unfit = field_of.batches(members, plan.numel, memory)
        left_out |= {c.name: "does not fit into memory beside the first of its family" for c in unfit}
        for run in runs:
            missing = [c for c in run if c.name not in {r["name"] for r in rows}]
            if clock.left < reserve:
                left_out |= {c.name: "no time left" for c in missing}
                continue
            try:
                times = batch(plan, run, timer, left_out)
            except Exception as error:  # what all of them share
                left_out |= {c.name: in_words(error) for c in missing}
                continue
            moved = 2 * plan.copy_bytes
            copies += [moved / seconds for seconds in times[COPY].device]
            rows += [row(plan, c, times, run[0].name, moved) for c in missing if c.name in times]
            section["copy_tb_s"] = summary(copies, 1e-12) if copies else None
            section["seconds"] = round(clock.elapsed - started, 1)
            keep(section)
            clock.say(f"{plan.title}: {family}, {', '.join(n for n in times if n != COPY)}")
    section["seconds"] = round(clock.elapsed - started, 1)
    keep(section)
    return section


def free_memory(device: torch.device) -> float:
    """Bytes that a batch may take."""
    if device.type != "cuda":
        return float(2**32)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] * (1 - RESERVE)


def batch(plan: Plan, run: Sequence[Contender], timer: Timer, left_out: dict[str, str]) -> dict[str, Times]:
    """Times of those that ran, and of copying, under `COPY`; of the rest says why not."""
    device = timer.device
    shared = {dtype: field_of.gradients(plan.shapes, dtype, device) for dtype in {c.dtype for c in run}}
    runners: dict[str, Runner | Copying] = {COPY: Copying(plan.copy_bytes, device)}
    waits: dict[str, float] = {}

    def fails(name: str, work: Callable[[], None]) -> bool:
        """A peer's failure is a result, not the end of the run: it leaves, the rest go on."""
        try:
            work()
        except Exception as error:
            if name == COPY:
                raise
            left_out[name] = in_words(error)
            runners.pop(name, None)
            return True
        return False

    def begin(contender: Contender) -> None:
        runner = contender.build(plan.shapes, shared[contender.dtype], device)
        timer.in_a_row(runner.step, plan.warm_up)
        runners[contender.name] = runner

    def wait(name: str) -> None:
        waits[name] = statistics.median(timer.in_a_row(runners[name].step, 1)[1] for _ in range(3))

    def measure(name: str) -> None:
        step = runners[name].step
        times[name].device.append(timer.on_device(step, waits[name]))
        if plan.in_a_row and name != COPY:
            wall, host = timer.in_a_row(step, plan.in_a_row)
            times[name].step.append(wall)
            times[name].host.append(host)

    for contender in run:
        fails(contender.name, partial(begin, contender))
    for name in list(runners):
        fails(name, partial(wait, name))
    times = {name: Times() for name in runners}
    order, shuffled = list(runners), random.Random(0)
    for _ in range(plan.rounds):
        shuffled.shuffle(order)
        for name in list(order):
            if fails(name, partial(measure, name)):
                order.remove(name)
                del times[name]
    return times


def row(plan: Plan, contender: Contender, times: Mapping[str, Times], first: str, moved: int) -> dict[str, Any]:
    """What is reported of a contender; ratios are medians over rounds, and above 1 where `first` is faster."""
    own = times[contender.name]
    out: dict[str, Any] = {
        "name": contender.name,
        "family": contender.family,
        "ours": contender.ours,
        "dtype": str(contender.dtype).removeprefix("torch."),
        "bytes_per_element": contender.traffic,
        "kept_per_element": contender.kept,
        "device_ms": summary(own.device, 1e3),
        "gelements_s": summary([plan.numel / t for t in own.device], 1e-9),
        "share_of_copy": summary(
            [
                contender.traffic * plan.numel / t / (moved / c)
                for t, c in zip(own.device, times[COPY].device, strict=True)
            ]
        ),
    }
    if own.step:
        out["step_ms"] = summary(own.step, 1e3)
        out["host_ms"] = summary(own.host, 1e3)
    if contender.name != first and first in times:
        out["first"] = first
        out["device_ratio"] = summary([a / b for a, b in zip(own.device, times[first].device, strict=True)])
        if own.step:
            out["step_ratio"] = summary([a / b for a, b in zip(own.step, times[first].step, strict=True)])
    return out


# Launch settings ------------------------------------------------------------------------------------------------------

TILES = (2, 4, 8, 16)  # one tile alone is an odd one, which goes the masked way
PROGRAMS = ((256, 1), (512, 1), (256, 4), (1024, 4))  # (elements per tile, warps)


def tunings() -> list[launch.Tuning]:
    return [launch.Tuning(tile, tiles, warps) for tile, warps in PROGRAMS for tiles in TILES]


def tune(
    entrants: Sequence[Contender],
    numel: int,
    rounds: int,
    timer: Timer,
    clock: Clock,
    settings: Sequence[launch.Tuning],
    keep: Keep = lambda section: None,
) -> dict[str, Any]:
    """Device times of each contender under each launch setting, interleaved; `keep` as in `race`."""
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    section = {"elements": numel, "rows": rows, "left_out": left_out}
    for contender in entrants:
        if clock.left < 20:
            left_out[contender.name] = "no time left"
        else:
            try:
                rows += _tune(contender, numel, rounds, timer, clock, settings, left_out)
                clock.say(f"launch settings: {contender.name}")
                free_memory(timer.device)
            except Exception as error:  # one that does not run costs nobody else a row
                left_out[contender.name] = in_words(error)
        keep(section)
    return section


def _tune(
    contender: Contender,
    numel: int,
    rounds: int,
    timer: Timer,
    clock: Clock,
    settings: Sequence[launch.Tuning],
    left_out: dict[str, str],
) -> list[dict[str, Any]]:
    """The rows of a contender; of settings that do not run says why not."""
    shapes: Shapes = [(numel,)]
    runner = contender.build(shapes, field_of.gradients(shapes, contender.dtype, timer.device), timer.device)
    times: dict[launch.Tuning, list[float]] = {setting: [] for setting in (launch.Tuning(), *settings)}
    for setting in list(times):
        what = f"{setting.tile} elements/tile, {setting.tiles} tiles/item, {setting.warps} warps"
        if setting != launch.Tuning() and clock.left < 10:  # what was not compiled ahead compiles here, one by one
            del times[setting]
            left_out[f"{contender.name}, {what}"] = "no time left"
            continue
        try:
            with launch.tuned(setting):
                timer.in_a_row(runner.step, 2)
        except Exception as error:  # more registers or shared memory than there are
            del times[setting]
            left_out[f"{contender.name}, {what if setting != launch.Tuning() else 'default'}"] = in_words(error)
    order, shuffled = list(times), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for setting in order:
            with launch.tuned(setting):
                runner.step()  # the tables of this setting are made again: not part of what is timed
                times[setting].append(timer.on_device(runner.step, 2e-4))
    base = times[launch.Tuning()]
    return [
        {
            "name": contender.name,
            "tile": setting.tile,
            "tiles": setting.tiles,
            "warps": setting.warps,
            "device_ms": summary(times[setting], 1e3),
            "speed": summary([a / b for a, b in zip(base, times[setting], strict=True)]),
        }
        for setting in order
    ]


def ahead(wanted: tuple[str, launch.Tuning | None]) -> tuple[None, bool]:
    """Puts kernels of a generated contender into Triton's cache on disk, from whatever process: for large tensors and,
    where no launch setting is given, for small ones."""
    name, setting = wanted
    contender = next(c for c in field_of.generated_contenders("triton") if c.name == name)
    device = torch.device("cuda")
    shapes: Shapes = [(4096,)] if setting else [(4096,), (64,)]
    runner = contender.build(shapes, field_of.gradients(shapes, contender.dtype, device), device)
    with launch.tuned(setting) if setting else nullcontext():
        runner.step()
    torch.cuda.synchronize()
    return None, True


# Targets --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A promise: the median of `value` in the row of `name`, in the section `where`, is at least `least`."""

    words: str
    where: str
    name: str
    value: str
    least: float


TARGETS = (
    Target("share of copy bandwidth, one large tensor", "tensor", "AdamW int8_split24", "share_of_copy", 0.88),
    Target("times FlashAdamW's speed, one large tensor", "tensor", "FlashAdamW", "device_ratio", 1.5),
    Target("times torch's fused fp32 AdamW, one large tensor", "tensor", "torch fused AdamW fp32", "device_ratio", 2.0),
    Target("times FlashAdamW's speed on GPT-2's tensors, host included", "gpt2", "FlashAdamW", "step_ratio", 6.0),
)


def judge(sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every target with what was measured: met, missed, or not measured."""
    out = []
    for target in TARGETS:
        rows = (sections.get(target.where) or {}).get("rows", [])
        found = next((r[target.value] for r in rows if r["name"] == target.name and target.value in r), None)
        measured = None if found is None else found["median"]
        verdict = "not measured" if measured is None else "met" if measured >= target.least else "missed"
        out.append({"target": target.words, "at_least": target.least, "measured": measured, "verdict": verdict})
    return out
