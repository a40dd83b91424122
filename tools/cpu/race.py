"""Timing: all contenders in one process, in a random order every round, beside the memory ceilings of their patterns.

A ratio is the median of the rounds' own ratios: what slows a whole round down (clocks, neighbours, which cores the
threads are put on) is in both of its times.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu import bench
from gpu.contenders import Runner, gradients
from gpu.machine import Clock
from gpu.shapes import Shapes, gpt2, total

from cpu import ceiling, contenders, machine
from cpu.ceiling import Streams
from cpu.contenders import BASE, FLAGSHIP, Entrant

GRAIN = 4096
"""Large sizes are multiples of it: other libraries quantize only what their blocks divide."""

WARM_UP = 3
"""Steps before anything is timed, where one takes less than LONG seconds."""

LONG = 1.0

HOT, IN_A_ROW = 4_000_000, 20_000_000
"""Up to HOT elements, a turn has steps in a row, over IN_A_ROW in all: they find in the caches what the last left."""

TURN = 0.4
"""Seconds after which a turn of steps in a row ends, whatever is left of it."""

SHARE_OF_SECTION = 15.0
"""Seconds that one contender may take of a section; slower ones take part in some of the rounds only."""

FEWEST = 3

SYSTEM_SHARE = 0.6
"""Of the memory that is free: the rest is for temporaries, which eager and compiled steps make."""


# Sizes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A list of tensors under the name that the command line calls it."""

    name: str
    shapes: Shapes

    @property
    def numel(self) -> int:
        return total(self.shapes)

    @property
    def steps(self) -> int:
        """Steps in a row within a turn."""
        return max(1, min(100, IN_A_ROW // self.numel)) if self.numel <= HOT else 1

    @property
    def whole_step(self) -> bool:
        """Whether the time of the call, not that of an element, is what a user waits for."""
        return len(self.shapes) > 1 and self.numel < 10**6

    @property
    def title(self) -> str:
        if self.name == "gpt2":
            return f"GPT-2's {len(self.shapes)} tensors, {self.numel:,} parameters"
        if len(self.shapes) > 1:
            return f"{len(self.shapes)} tensors of {self.shapes[0][0]:,}"
        return f"{self.numel:,} parameters" + ", steps in a row" * (self.steps > 1)


def size(name: str) -> Size:
    """
    >>> size("148x512").title, size("1e6").numel, size("gpt2").numel
    ('148 tensors of 512', 999424, 124439808)
    """
    if name == "gpt2":
        return Size(name, gpt2())
    count, _, each = name.rpartition("x")
    try:
        numel, tensors = int(float(each)), int(count or 1)
    except (ValueError, OverflowError):
        raise ValueError(f"{name!r} is no size: 3e7 (one tensor), 148x512 (several of 512), or gpt2") from None
    if numel < 1 or tensors < 1:
        raise ValueError(f"{name!r} is no size: nothing to step")
    if numel >= 2 * GRAIN:
        numel = round(numel / GRAIN) * GRAIN
    return Size(name, [(numel,)] * tensors)


# A section ------------------------------------------------------------------------------------------------------------


@dataclass
class Lane:
    """Whatever takes turns in a section, with what it took.

    steps    in a row within a turn
    every    takes part in so many of the rounds
    seconds  round -> seconds per step
    """

    name: str
    runner: Any
    steps: int
    rounds: int
    entrant: Entrant | None = None
    streams: Streams | None = None
    first_s: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)

    def takes_part(self, number: int, of: int) -> bool:
        """Whether in that round: its rounds lie evenly among all."""
        return (number + 1) * self.rounds // of > number * self.rounds // of

    def turn(self) -> float:
        """Seconds per step."""
        step = self.runner.step
        if self.steps > 1:
            step()  # fills the caches again
        start = time.perf_counter()
        for _ in range(self.steps):
            step()
        return (time.perf_counter() - start) / self.steps


def section(
    size: Size,
    threads: int,
    entrants: Sequence[Entrant],
    rounds: int,
    loop: ctypes.CDLL | None,
    say: Callable[[str], None] = lambda text: None,
    memory: float | None = None,
) -> dict[str, Any]:
    """All contenders over one list of tensors, on so many threads.

    loop     the compiled loop of the ceilings, None where there is none
    memory   bytes that may be taken
    """
    clock, before = Clock(math.inf), torch.get_num_threads()
    torch.set_num_threads(threads)
    # What torch compiled for another number of threads splits its loops in that many.
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    free = machine.available_memory() * SYSTEM_SHARE if memory is None else memory
    runs, unfit = contenders.batches(entrants, size.numel, free)
    left_out = {c.name: "does not fit into memory beside what it is compared with" for c in unfit}
    rows: list[dict[str, Any]] = []
    ceilings: dict[Streams, dict[str, Any]] = {}
    try:
        for run in runs:
            lanes = batch(size, run, rounds, loop, left_out, say)
            sweeps = {lane.streams: lane for lane in lanes if lane.entrant is None and lane.streams}
            for pattern, lane in sweeps.items():
                ceilings.setdefault(pattern, ceiling_row(size, lane, pattern))
            known = {row["name"] for row in rows}
            rows += [row(size, lane, lanes) for lane in lanes if lane.entrant and lane.name not in known]
            del lanes, sweeps
            gc.collect()
    finally:
        torch.set_num_threads(before)
    order = [c.name for c in entrants]
    return {
        "size": size.name,
        "title": size.title,
        "tensors": len(size.shapes),
        "elements": size.numel,
        "whole_step": size.whole_step,
        "threads": threads,
        "rounds": rounds,
        "batches": len(runs),
        "rows": sorted(rows, key=lambda found: order.index(found["name"])),
        "ceilings": sorted(ceilings.values(), key=lambda found: -found["bytes_per_parameter"]),
        "left_out": left_out,
        "seconds": round(clock.elapsed, 1),
    }


def batch(
    size: Size,
    run: Sequence[Entrant],
    rounds: int,
    loop: ctypes.CDLL | None,
    left_out: dict[str, str],
    say: Callable[[str], None],
) -> list[Lane]:
    """Those that ran and the ceilings of what they move, timed; of the rest says why not."""
    cpu = torch.device("cpu")
    shared = {dtype: gradients(size.shapes, dtype, cpu) for dtype in {c.dtype for c in run}}
    lanes: list[Lane] = []
    for entrant in run:
        try:
            lanes.append(enter(size, entrant, shared[entrant.dtype], rounds))
        except Exception as error:  # a contender's failure is a result, not the end of the run
            left_out[entrant.name] = machine.scrub(f"{type(error).__name__}: {str(error).strip()[:300]}")
            say(f"{entrant.name} left out: {left_out[entrant.name]}")
    if loop is not None and lanes and not size.whole_step:
        patterns = list(dict.fromkeys(lane.streams.pattern for lane in lanes if lane.streams))
        room = ceiling.Memory(patterns, size.numel)
        for pattern in patterns:
            sweep = ceiling.Ceiling(loop, pattern, room)
            sweep.step()
            lanes.append(Lane(f"ceiling: {pattern.words}", sweep, size.steps, rounds, streams=pattern))
    order, shuffled = list(lanes), random.Random(0)
    gc.collect()
    gc.disable()  # a collection would fall into somebody's turn
    try:
        for number in range(rounds):
            shuffled.shuffle(order)
            for lane in order:
                if lane.takes_part(number, rounds):
                    with lane.entrant.path() if lane.entrant else no_path():
                        lane.seconds[number] = lane.turn()
    finally:
        gc.enable()
    return lanes


@contextmanager
def no_path() -> Iterator[None]:
    yield


def enter(size: Size, entrant: Entrant, shared: Sequence[torch.Tensor], rounds: int) -> Lane:
    """A contender in memory, warm, with as many steps and rounds as its speed allows."""
    with entrant.path(), silence():
        start = time.perf_counter()
        runner: Runner = entrant.build(size.shapes, shared, torch.device("cpu"))
        runner.step()
        first = time.perf_counter() - start
        took = math.inf
        for _ in range(WARM_UP - 1):
            start = time.perf_counter()
            runner.step()
            took = min(took, time.perf_counter() - start)
            if took > LONG:
                break
    steps = max(1, min(size.steps, int(TURN / took)))
    turn = took * (steps + (steps > 1))
    allowed = max(FEWEST, min(rounds, int(SHARE_OF_SECTION / turn)))
    pattern = contenders.streams(runner)
    return Lane(entrant.name, runner, steps, min(allowed, rounds), entrant, pattern, first)


@contextmanager
def silence() -> Iterator[None]:
    """Nothing is printed: libraries and the compilers that they start write to both streams, past Python's own."""
    library = ctypes.CDLL(None) if os.name != "nt" else None
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    try:
        with tempfile.TemporaryFile() as sink:
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
            try:
                yield
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                if library is not None:
                    library.fflush(None)  # what C code has printed and kept back
                for number, copy in zip((1, 2), saved, strict=True):
                    os.dup2(copy, number)
    finally:
        for copy in saved:
            os.close(copy)


# What is reported -----------------------------------------------------------------------------------------------------


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """As the GPU benchmark's, with no more digits than a run repeats."""
    found = bench.summary(values, scale)
    return {name: value if name == "n" else float(f"{value:.4g}") for name, value in found.items()}


def ratios(slower: Mapping[int, float], faster: Mapping[int, float]) -> list[float]:
    """Per round in which both took part: above 1 where the second is the faster."""
    return [slower[number] / faster[number] for number in slower if number in faster]


def row(size: Size, lane: Lane, lanes: Sequence[Lane]) -> dict[str, Any]:
    """What is reported of a contender."""
    entrant, pattern = lane.entrant, lane.streams
    assert entrant is not None and pattern is not None
    others = {other.name: other for other in lanes if other.entrant}
    sweep = next((other for other in lanes if other.entrant is None and other.streams == pattern.pattern), None)
    seconds = list(lane.seconds.values())
    found: dict[str, Any] = {
        "name": lane.name,
        "ours": entrant.ours,
        "dtype": str(entrant.dtype).removeprefix("torch."),
        "bytes_per_parameter": round(pattern.total, 4),
        "kept_per_parameter": round(pattern.kept, 4),
        "first_step_s": round(lane.first_s, 3),
        "steps_in_a_row": lane.steps,
        "ns_per_parameter": summary(seconds, 1e9 / size.numel),
        "us_per_step": summary(seconds, 1e6),
    }
    if BASE in others and lane.name != BASE:
        found["speed"] = summary(ratios(others[BASE].seconds, lane.seconds))
    if entrant.ours:
        versus = {n: o for n, o in others.items() if not o.entrant.ours and n != BASE}  # type: ignore[union-attr]
        found["versus"] = {name: summary(ratios(other.seconds, lane.seconds)) for name, other in versus.items()}
    if sweep is not None:
        found["share_of_ceiling"] = summary(ratios(sweep.seconds, lane.seconds))
    return found


def ceiling_row(size: Size, lane: Lane, pattern: Streams) -> dict[str, Any]:
    seconds = list(lane.seconds.values())
    return {
        "streams": pattern.words,
        "bytes_per_parameter": round(pattern.total, 4),
        "ns_per_parameter": summary(seconds, 1e9 / size.numel),
        "gb_s": summary([pattern.total * size.numel / s for s in seconds], 1e-9),
    }


# Targets --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A promise: on so many threads, `name` steps the tensors of `size` at least so many times as fast as `against`.

    needs   a flag of the processor without which the promise is not given
    """

    name: str
    size: str
    threads: int
    least: float
    against: str = BASE
    needs: str = ""


def _targets() -> Iterator[Target]:
    for name, size_name, one, two, against, needs in (
        (FLAGSHIP, "3e7", 1.3, 1.5, BASE, "avx512f"),
        (f"{FLAGSHIP}, avx2", "3e7", 1.0, 1.2, BASE, "avx2"),
        ("AdamW fp32", "3e7", 1.1, 1.1, BASE, ""),
        ("AdamW fp32", "1e6", 1.5, 1.1, BASE, ""),
        ("Lion int8_split24", "3e7", 1.5, 1.6, BASE, ""),
        (FLAGSHIP, "148x512", 4.0, 6.0, BASE, ""),
        (FLAGSHIP, "3e7", 1.1, 1.3, "DeepSpeedCPUAdam fp32", ""),
        (FLAGSHIP, "3e7", 40.0, 40.0, "torchao AdamW8bit fp32", ""),
        (FLAGSHIP, "3e7", 50.0, 50.0, "torchao AdamW4bit fp32", ""),
        (FLAGSHIP, "3e7", 5.0, 5.0, "torchao AdamWFp8 fp32", ""),
        (FLAGSHIP, "3e7", 40.0, 40.0, "bitsandbytes AdamW8bit fp32", ""),
    ):
        yield Target(name, size_name, 1, one, against, needs)
        yield Target(name, size_name, 2, two, against, needs)


TARGETS = tuple(_targets())


def judge(sections: Sequence[Mapping[str, Any]], vectors: Sequence[str]) -> list[dict[str, Any]]:
    """Every target with what was measured: met, missed, not measured, or not promised on such a processor."""
    out = []
    for target in TARGETS:
        measured = None
        for part in sections:
            if part["size"] == target.size and part["threads"] == target.threads:
                found: Mapping[str, Any] = next((r for r in part["rows"] if r["name"] == target.name), {})
                spread = found.get("speed") if target.against == BASE else found.get("versus", {}).get(target.against)
                measured = spread["median"] if spread else measured
        if target.needs and target.needs not in vectors:
            verdict = f"not promised without {target.needs}"
        elif measured is None:
            verdict = "not measured"
        else:
            verdict = "met" if measured >= target.least else "missed"
        out.append(
            {
                "name": target.name,
                "against": target.against,
                "size": target.size,
                "threads": target.threads,
                "at_least": target.least,
                "measured": measured,
                "verdict": verdict,
            }
        )
    return out
