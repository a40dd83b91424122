"""Benchmarks of the CPU backend on this machine, beside torch's optimizers and those of other libraries.

    .venv/bin/python tools/bench_cpu.py                   everything; about half an hour where all peers are installed
    .venv/bin/python tools/bench_cpu.py --quick           under a minute: no peers, fewer sizes and rounds
    .venv/bin/python tools/bench_cpu.py --only int8 --sizes 3e7 --threads 1

Peers are compared where they are installed (tools/cpu/requirements-bench.txt).  Writes docs/benchmarks/cpu-<model>.json
after every section, and .md and .png at the end.  The exit code is 0 whatever the times are, 1 where a target is missed
under --strict, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent

SIZES = ("1e5", "1e6", "3e7", "gpt2", "148x512", "148x4096")
QUICK_SIZES = ("1e6", "3e7", "148x512")
ROUNDS, QUICK_ROUNDS = 30, 9
QUICK = (
    "torch AdamW fused fp32",
    "torch AdamW fused bf16",
    "AdamW fp32",
    "AdamW int8_split24",
    "AdamW int8_split24, avx2",
    "Lion int8_split24",
)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="no peers, fewer sizes and rounds")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="contenders whose name has one of these")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="SIZE", help=f"of {' '.join(SIZES)}, or others alike")
    parser.add_argument("--threads", nargs="*", type=int, default=[], help="numbers of threads; none: 1, 2 and all")
    parser.add_argument("--rounds", type=int, default=0, help=f"0: {ROUNDS}, --quick {QUICK_ROUNDS}")
    parser.add_argument("--backend", choices=("cpp", "reference"), default="cpp", help="of the generated optimizers")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the reports")
    parser.add_argument("--name", default="", help="cpu-NAME.json and so on; none: the processor's model")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(given)
    sys.path[:0] = [p for p in map(str, (ROOT, HERE)) if p not in sys.path]
    try:
        return Bench(chosen).run()
    except WrongCall as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class WrongCall(Exception):
    """The options make no run; the text says why."""


class Bench:
    """One run: its options, its clock, and the report as far as it has come."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from cpu import contenders, machine, race
        from gpu.machine import Clock, cores, slug

        if os.environ.get("OPTGEN_ISA"):
            raise WrongCall("OPTGEN_ISA is set, but the benchmark takes the code paths in turn: unset it")
        self.chosen = chosen
        try:
            self.sizes = [race.size(name) for name in chosen.sizes or (QUICK_SIZES if chosen.quick else SIZES)]
        except ValueError as error:
            raise WrongCall(error) from None
        self.threads = sorted(set(chosen.threads)) or default_threads(cores())
        if min(self.threads) < 1:
            raise WrongCall("--threads takes numbers from 1 on")
        self.rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
        if self.rounds < 1:
            raise WrongCall("--rounds takes numbers from 1 on")
        self.clock = Clock(math.inf)
        self.machine = machine.describe(contenders.PACKAGES)
        self.path: Path = chosen.out / f"cpu-{slug(chosen.name or self.machine['cpu'])}.json"
        self.data: dict[str, Any] = {
            "machine": self.machine,
            "rounds": self.rounds,
            "quick": chosen.quick,
            "backend": chosen.backend,
            "sections": [],
            "missing": {},
            "targets": [],
        }

    def run(self) -> int:
        from cpu import race, report

        entrants = self.entrants()
        loop = self.loop()
        self.clock.say(f"{self.machine['cpu']}, torch {self.machine['torch']}: {len(entrants)} contenders")
        for threads in self.threads:
            for size in self.sizes:
                found = race.section(size, threads, entrants, self.rounds, loop, self.clock.say)
                self.data["sections"].append(found)
                self.data["targets"] = race.judge(self.data["sections"], self.machine["vectors"])
                self.save()
                self.clock.say(f"{found['title']}, {report.threads_of(found)}: {found['seconds']:.0f} s")
                report.show_section(found)
        return self.finish()

    def entrants(self) -> list[Any]:
        """What --quick and --only leave of all contenders, and always the one that all are compared with."""
        from cpu import contenders, race

        found = contenders.torch_s_own() + contenders.generated(self.chosen.backend)
        if self.chosen.quick and not self.chosen.only:
            return [c for c in found if c.name in QUICK]
        with race.silence():
            peers, self.data["missing"] = contenders.peers()
        words = [word.lower() for word in self.chosen.only]
        named = [c for c in found + peers if not words or any(word in c.name.lower() for word in words)]
        if not named:
            raise WrongCall(f"--only: no contender here has {' or '.join(words)} in its name")
        return named if found[0] in named else [found[0], *named]

    def loop(self) -> Any:
        from cpu import ceiling

        try:
            return ceiling.library()
        except ceiling.Unavailable as error:
            self.data["missing"]["memory ceiling"] = str(error)
            return None

    def save(self) -> None:
        from cpu import machine
        from gpu import report

        self.data["missing"] = {name: machine.scrub(why) for name, why in self.data["missing"].items()}
        self.data["seconds"] = round(self.clock.elapsed, 1)
        report.write_json(self.path, self.data)

    def finish(self) -> int:
        from cpu import report

        image = self.path.with_suffix(".png")
        drawn = report.picture(self.data, image)
        text = report.markdown(self.data, image.name if drawn else None)
        self.path.with_suffix(".md").write_text(text, encoding="utf-8")
        self.save()
        report.show_targets(self.data["targets"])
        for name, why in self.data["missing"].items():
            print(f"missing: {name} ({why})")
        print(f"written: {self.path} and .md" + (" and .png" if drawn else ""), flush=True)
        missed = any(target["verdict"] == "missed" for target in self.data["targets"])
        return int(self.chosen.strict and missed)


def default_threads(cores: int) -> list[int]:
    """One, two, and all of the machine's cores.

    >>> default_threads(2), default_threads(1), default_threads(16)
    ([1, 2], [1], [1, 2, 16])
    """
    return sorted({1, min(2, cores), cores})


if __name__ == "__main__":
    sys.exit(main())
