"""Benchmarks of the CPU backend on this machine, beside torch's optimizers and those of other libraries.

    python -m tools.bench cpu                   everything; about half an hour where all peers are installed
    python -m tools.bench cpu --quick           under a minute: no peers, fewer sizes and rounds
    python -m tools.bench cpu --only int8 --sizes 3e7 --threads 1
    python -m tools.bench cpu --add --only rn CAME --sizes 3e7 --threads 1       beside what the report has already

Peers are compared where they are installed (tools/bench/requirements.txt). Writes docs/benchmarks/cpu-<model>.json and
.md after every section. The exit code is 0 whatever the times are, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import race
from tools.bench.race import BASE, FLAGSHIP, Contender

ROOT = Path(__file__).resolve().parents[2]

SIZES, QUICK_SIZES = ("1e5", "1e6", "3e7", "gpt2", "148x512", "148x4096"), ("1e6", "3e7", "148x512")
ROUNDS, QUICK_ROUNDS = 30, 9
QUICK = (BASE, "torch AdamW fused bf16", "AdamW fp32", FLAGSHIP, f"{FLAGSHIP}, avx2", "Lion int8_split24")
HOT, IN_A_ROW, GRAIN = 4_000_000, 20_000_000, 4096
"""Up to HOT elements, a turn has steps in a row, over IN_A_ROW in all: they find in the caches what the last left.
Large sizes are multiples of GRAIN: other libraries quantize only what their blocks divide."""


def size(name: str) -> tuple[str, race.Shapes, int]:
    """Return (title, shapes, steps in a row within a turn) of what the command line calls a size.

    >>> size("148x512")[0], size("1e6")[2], len(size("gpt2")[1])
    ('148 tensors of 512', 20, 148)
    """
    if name == "gpt2":
        shapes = race.gpt2()
        return f"GPT-2's {len(shapes)} tensors", shapes, 1
    count, _, each = name.rpartition("x")
    try:
        numel, tensors = int(float(each)), int(count or 1)
    except (ValueError, OverflowError):
        numel = tensors = 0
    if numel < 1 or tensors < 1:
        raise ValueError(f"{name!r} is no size: expected 3e7 (one tensor), 148x512 (several of 512), or gpt2")
    numel = round(numel / GRAIN) * GRAIN if numel >= 2 * GRAIN else numel
    steps = max(1, min(100, IN_A_ROW // (numel * tensors))) if numel * tensors <= HOT else 1
    title = f"{tensors} tensors of {numel:,}" if tensors > 1 else f"{numel:,} parameters"
    shape = (numel // GRAIN, GRAIN) if numel % GRAIN == 0 else (numel,)  # CAME and Adafactor keep rows and columns
    return title + ", steps in a row" * (steps > 1 and tensors == 1), [shape] * tensors, steps


def chosen(only: Sequence[str], quick: bool, backend: str) -> tuple[list[Contender], dict[str, str]]:
    """Return (contenders, name -> why it is missing); the one that all are compared with is always among them."""
    found = race.torch_s_own() + race.generated(backend)
    found += [race.in_groups(c) for c in found if c.name in (BASE, "AdamW fp32", FLAGSHIP)]
    if quick and not only:
        return [c for c in found if c.name in QUICK], {}
    others, missing = race.peers("cpu")
    named = [c for c in found + others if not only or any(word.lower() in c.name.lower() for word in only)]
    if not named:
        raise ValueError(f"--only: no contender here has {' or '.join(only)} in its name")
    return (named if found[0] in named else [found[0], *named]), missing


def added(before: race.Section | None, found: race.Section) -> race.Section:
    """Return a section with the rows of an earlier run that it has not; each row's ratios are those of its own run."""
    rows = {row["name"]: row for part in (before, found) if part for row in part["rows"]}
    left_out = {} if before is None else before["left_out"]
    left_out = {name: why for name, why in (left_out | found["left_out"]).items() if name not in rows}
    return {**found, "rows": list(rows.values()), "left_out": left_out}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="no peers, fewer sizes and rounds")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="contenders whose name has one of these")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="SIZE", help=f"of {' '.join(SIZES)}, or others alike")
    parser.add_argument("--threads", nargs="*", type=int, default=[], help="numbers of threads; none: 1, 2 and all")
    parser.add_argument("--rounds", type=int, default=0, help=f"0: {ROUNDS}, --quick {QUICK_ROUNDS}")
    parser.add_argument("--add", action="store_true", help="keep the report's other sections, and other rows of these")
    parser.add_argument("--backend", choices=("cpp", "reference"), default="cpp", help="of the generated optimizers")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the reports")
    parser.add_argument("--name", default="", help="cpu-NAME.json and .md; none: the processor's model")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    rounds = asked.rounds or (QUICK_ROUNDS if asked.quick else ROUNDS)
    threads = sorted(set(asked.threads)) or sorted({1, min(2, race.cores()), race.cores()})
    try:
        if os.environ.get("OPTGEN_ISA"):
            raise ValueError("OPTGEN_ISA is set, but the benchmark takes the code paths in turn: unset it")
        if min(threads) < 1 or rounds < 1:
            raise ValueError("--threads and --rounds take numbers from 1 on")
        sizes = {name: size(name) for name in asked.sizes or (QUICK_SIZES if asked.quick else SIZES)}
        contenders, missing = chosen(asked.only, asked.quick, asked.backend)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine, began = race.machine("cpu"), time.monotonic()
    path = asked.out / f"cpu-{race.slug(asked.name or machine['device'])}.json"
    kept = race.read(path) if asked.add else {}
    sections = kept.get("sections", {})
    data: dict[str, Any] = {"machine": machine, "backend": asked.backend, "sections": sections, "missing": missing}
    say = functools.partial(print, flush=True)
    say(f"{machine['device']}, torch {machine['torch']}: {len(contenders)} contenders")
    for count in threads:
        for name, (title, shapes, steps) in sizes.items():
            copied = 2**28 if steps == 1 else 0  # what lies in the caches is not held to memory
            some = [c for c in contenders if len(shapes) > 1 or "group" not in c.name]
            found = race.section(title, shapes, some, threads=count, rounds=rounds, steps=steps, copied=copied)
            sections[f"{name}, {count}"] = added(sections.get(f"{name}, {count}"), found)
            data["seconds"] = round(kept.get("seconds", 0) + time.monotonic() - began, 1)
            race.save(path, data)
            race.write(path.with_suffix(".md"), race.markdown(data))
            say("\n".join(race.section_lines(found)))
    say(f"written: {path} and .md")
    return 0
