"""Tests and benchmarks of the generated kernels on this machine's GPU.

    make gpu-check                            sets up .venv first; with a Python that has torch, just
    python3 tools/gpu_check.py                everything, under 8 minutes
    python3 tools/gpu_check.py --quick        default flags, fewer rounds
    python3 tools/gpu_check.py --tune         also which launch settings are fastest

Benchmarks come first, in this process, whose CUDA context nothing has harmed yet; whatever is checked runs in processes
of its own and may cost them theirs.  What there is no time for is named in the report.

Needs torch and Triton, and generated/ as committed; nothing of the compiler is imported, but for rules of several
sweeps.  Writes docs/benchmarks/<device>_<date>.json as it goes, and .md and .png at the end.  Two runs, each of one
half, make one report on the same day or with --merge.  The exit code is 0 where every kernel is correct, 1 where one is
not or could not be checked, 2 for a wrong call; times never change it.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent

BUDGET = 450.0
GRACE = 60.0  # seconds after the budget; what is begun ends long before
BENCH_SHARE = 0.45  # of the budget, at most, where checks follow
AHEAD_SHARE = 0.5  # of what benchmarks have left, at most, for compiling what they time
JOBS = 16  # processes that check: each has a CUDA context of about half a GiB, and compiles on one core
FULL = {"tensor": 30, "gpt2": 30, "llama_8b": 10, "tune": 9}
QUICK = {"tensor": 10, "gpt2": 10, "llama_8b": 5, "tune": 5}
DRY = {"tensor": 2, "gpt2": 2, "llama_8b": 2, "tune": 2}
DRY_ENTRANTS = ("AdamW int8_split24", "AdamW fp32", "torch fused AdamW fp32")


MERGE = "another run's report on such a machine: what this run leaves out is taken from there"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", choices=("correctness", "bench"), help="one half of it")
    parser.add_argument("--quick", action="store_true", help="default flags only, fewer rounds")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="SPEC[.PLAN[.DTYPE]]", help="check only these")
    parser.add_argument("--huge", action="store_true", help="also a tensor of more than 2^31 elements (20 GiB)")
    parser.add_argument("--tune", action="store_true", help="also compare launch settings")
    parser.add_argument("--no-llama", action="store_true", help="leave out the 8B list (60 to 120 GiB)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the reports")
    parser.add_argument("--merge", type=Path, action="append", default=[], metavar="JSON", help=MERGE)
    parser.add_argument("--json", action="store_true", help="print the report as JSON on the last line")
    parser.add_argument("--jobs", type=int, default=0, help="processes that check; 0: as the machine allows")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which nothing new is started")
    parser.add_argument("--generated", type=Path, default=ROOT, help="folder that holds the package `generated`")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="a folder with further packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in the interpreter")
    return parser.parse_args(given)


def prepare(generated: Path, peers: Sequence[Path]) -> None:
    """Makes the packages importable, here and in the processes that check."""
    sys.path[:0] = [p for p in map(str, (generated, ROOT, HERE)) if p not in sys.path]
    sys.path += [str(p) for p in peers]


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(given)
    if not (chosen.generated / "generated" / "__init__.py").is_file():
        print(f"error: no package `generated` in {chosen.generated} (build it: optgen build)", file=sys.stderr)
        return 2
    prepare(chosen.generated.resolve(), chosen.peers)
    problem = unusable(chosen.device)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    check = Check(chosen)
    try:
        for path in chosen.merge:
            check.merge(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return check.run()


def unusable(device: str) -> str | None:
    """Why nothing can be run here, in words."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu" and not interpreted:
        return "--device cpu is a dry run in Triton's interpreter: set TRITON_INTERPRET=1"
    if device == "cuda" and interpreted:
        return "TRITON_INTERPRET=1 is set: kernels would not run on the GPU; unset it, or use --device cpu"
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here (TRITON_INTERPRET=1 with --device cpu tries the checks out in the interpreter)"
    return None


class Check:
    """One run: its options, its clock, and the report as far as it has come."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        from gpu import machine, report

        self.chosen = chosen
        self.dry = chosen.device == "cpu"
        self.clock = machine.Clock(chosen.budget)
        self.machine = machine.describe(chosen.device)
        name = f"{machine.slug(self.machine['device'])}_{self.machine['date']}"
        self.path: Path = chosen.out / f"{name}.json"
        # What an earlier run of the same day found on the same versions stays, section by section.
        earlier = report.read_json(self.path)
        self.data: dict[str, Any] = earlier if earlier.get("machine") == self.machine else {"machine": self.machine}
        self.clock.say(f"{self.machine['device']}, torch {self.machine['torch']}, triton {self.machine['triton']}")

    def merge(self, path: Path) -> None:
        """Sections of another run's report; those that are made here take their place."""
        from gpu import report

        other = report.read_json(path)
        for key in ("device", "torch", "triton"):
            if (other.get("machine") or {}).get(key) != self.machine[key]:
                raise ValueError(f"{path} is no report of such a machine: another {key}")
        self.data = {**other, **self.data}

    def run(self) -> int:
        correct = True
        watch = threading.Timer(self.chosen.budget + GRACE, self.give_up)
        watch.daemon = True
        watch.start()
        try:
            if self.chosen.only != "correctness":
                self.part("bench", self.bench)  # times must never decide
                self.part("room", self.make_room)
            if self.chosen.only != "bench":
                correct = self.part("correctness", self.correctness) is True
        finally:
            watch.cancel()
            self.finish()
        return 0 if correct else 1

    def give_up(self) -> None:
        """Ends a run that waits for a GPU which does not answer: only processes that check are stopped otherwise."""
        self.data["run_error"] = f"the GPU still did not answer {GRACE:.0f} s after the end of the budget"
        for process in multiprocessing.active_children():
            process.kill()
        try:
            self.finish()
        finally:
            os._exit(1)

    def make_room(self) -> None:
        """What benchmarks leave in this process' pool is for the processes that check."""
        import torch
        from gpu import bench

        bench.free_memory(torch.device(self.chosen.device))

    def part(self, name: str, make: Callable[[], object]) -> object:
        """What `make` returns; None where an error ends it, of which the report says."""
        from gpu import machine

        self.data.pop(f"{name}_error", None)
        try:
            return make()
        except Exception as error:  # the report says it, and what was kept is written
            self.data[f"{name}_error"] = machine.in_words(error)
            self.clock.say(f"{name} ended early: {self.data[f'{name}_error']}")
            self.save()
        return None

    def save(self) -> None:
        from gpu import report

        report.write_json(self.path, self.data)

    def finish(self) -> None:
        """Writes everything; the picture last, whose library may fail in ways of its own."""
        import json

        from gpu import machine, report

        self.data["seconds"] = round(self.clock.elapsed, 1)
        self.save()
        page, image = self.path.with_suffix(".md"), self.path.with_suffix(".png")
        text = report.markdown(self.data, None)
        page.write_text(text, encoding="utf-8")
        drawn = False
        try:
            drawn = report.picture(self.data, image)
        except Exception as error:  # the library's own; the report is written already
            self.clock.say(f"no picture: {machine.in_words(error)}")
        if drawn:
            text = report.markdown(self.data, image.name)
            page.write_text(text, encoding="utf-8")
        print("\n" + text, flush=True)
        print(f"written: {self.path} and .md" + (" and .png" if drawn else ""), flush=True)
        if self.chosen.json:
            print(json.dumps(self.data, default=str), flush=True)

    # -- correctness --------------------------------------------------------------------------------------------

    def correctness(self) -> bool:
        """Whether everything was checked and is right."""
        from gpu import jobs

        todo = jobs.in_order(self.todo())
        found: dict[tuple[str, str], Any] = {}
        started = self.clock.elapsed
        self.clock.say(f"correctness: {len(todo)} checks")
        right = self.note(todo, found, started)
        for job, outcome in self.outcomes(todo):
            found[job.part, job.case] = outcome
            if outcome.problems:
                self.clock.say(f"FAILED {job.case} ({job.part}): {outcome.problems[0]}")
            if len(found) % 40 == 0:
                self.clock.say(f"correctness: {len(found)} of {len(todo)}")
                self.note(todo, found, started)
        right = self.note(todo, found, started)
        self.clock.say(f"correctness: {self.data['correctness']['summary']}")
        if len(found) < len(todo):
            self.clock.say(f"correctness: no time left for {len(todo) - len(found)} checks")
        return right

    def todo(self) -> list[Any]:
        """All that is asked for."""
        from gpu import catalog, correct, jobs

        device = self.chosen.device
        found = jobs.of_cases(catalog.cases(self.chosen.kernels, quick=self.chosen.quick), device, self.dry)
        if not found:
            raise ValueError("no kernels of such names")
        if self.chosen.huge:
            case = correct.huge_case()
            if case is None:
                raise ValueError("no plan without random numbers was built, for a huge tensor")
            found.append(jobs.of_huge(case, device, 2**14 + 17 if self.dry else correct.HUGE))
        if not self.chosen.kernels:
            found += [*jobs.of_stages(device), *jobs.of_graphs(device), *jobs.of_moves(device)]
        return found

    def note(self, todo: Sequence[Any], found: dict[tuple[str, str], Any], started: float) -> bool:
        """Writes what is known so far, part by part; whether all of it is right and complete."""
        from gpu import jobs

        right = True
        for part in jobs.PARTS:
            names = [job.case for job in todo if job.part == part]
            outcomes = [found[part, name] for name in names if (part, name) in found]
            missing = [name for name in names if (part, name) not in found]
            right = right and not missing and not any(o.problems for o in outcomes)
            if part == "correctness":
                self.note_kernels(outcomes, missing, started)
            elif names:
                self.data[part] = {"outcomes": [asdict(o) for o in outcomes], "not_run": missing}
        self.save()
        return right

    def note_kernels(self, outcomes: Sequence[Any], missing: Sequence[str], started: float) -> None:
        failed = [o for o in outcomes if not o.ok]
        kernels = {name for o in outcomes if o.ok for name in o.kernels}
        worst: dict[str, float] = {}
        for o in outcomes:
            for name, value in o.worst.items():
                key = f"{o.case}: {name}"
                worst[key] = max(worst.get(key, 0.0), value)
        elements = sum(o.elements for o in outcomes)
        words = f"{len(outcomes) - len(failed)} of {len(outcomes) + len(missing)} settings agree with the reference"
        words += f": {len(kernels)} kernels, {elements:,} elements compared"
        words += f"; {len(failed)} failed" * bool(failed) + f"; {len(missing)} not run" * bool(missing) + "."
        self.data["correctness"] = {
            "summary": words,
            "ok": not failed and not missing,
            "quick": self.chosen.quick,
            "failed": [asdict(o) for o in failed],
            "not_run": list(missing),
            "worst": dict(sorted(worst.items(), key=lambda item: -item[1])[:40]),
            "outcomes": [asdict(o) for o in outcomes],
            "seconds": round(self.clock.elapsed - started, 1),
        }

    def outcomes(self, todo: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """(job, its outcome) as they come, while there is time."""
        from gpu import jobs, workers

        if self.jobs == 1 and self.dry:
            for job in todo:
                if self.clock.left <= 0:
                    return
                yield job, jobs.run(job)[0]
            return
        longest = math.inf if self.dry else jobs.LONGEST
        for job, result in workers.each(jobs.run, todo, self.jobs, self.clock.end, longest):
            yield job, job.failed(result.why) if isinstance(result, workers.Lost) else result

    @property
    def jobs(self) -> int:
        from gpu import machine

        return self.chosen.jobs or (1 if self.dry else min(machine.cores(), JOBS))

    # -- benchmarks ---------------------------------------------------------------------------------------------

    def bench(self) -> None:
        import torch
        from gpu import bench, contenders, shapes

        clock = self.clock if self.chosen.only == "bench" else self.clock.until(BENCH_SHARE)
        names = [c.name for c in contenders.generated_contenders("triton")]
        self.compile_ahead([(name, None) for name in names], clock)
        timer = bench.Timer(torch.device(self.chosen.device))
        rounds = DRY if self.dry else QUICK if self.chosen.quick else FULL
        others, self.data["missing"] = contenders.peers()
        entrants = contenders.generated_contenders("triton") + others
        tensor: shapes.Shapes = [(10**9,)]
        gpt2, llama = shapes.gpt2(), shapes.llama_8b()
        if self.dry:  # the interpreter takes milliseconds for every operation of a kernel
            entrants = [c for c in entrants if c.name in DRY_ENTRANTS]
            tensor, gpt2, llama = [(5000,)], shapes.gpt2(4, 1, 40, 8), shapes.llama_8b(4, 1, 8, 2, 40)
        else:
            first = [c for c in entrants if c.family == entrants[0].family]
            tensor = [(contenders.scaled(10**9, first, bench.free_memory(timer.device) - 2**32),)]
        small = {"copy_bytes": 2**16, "warm_up": 1} if self.dry else {}
        in_a_row = {"gpt2": 1, "llama_8b": 1} if self.dry else {"gpt2": 10, "llama_8b": 3}
        bf16 = (torch.bfloat16,)  # in fp32, weights and states of 8e9 parameters fill the memory alone
        plans = [
            bench.Plan("tensor", "One large tensor", tensor, rounds["tensor"], **small),
            bench.Plan("gpt2", "GPT-2's tensors", gpt2, rounds["gpt2"], in_a_row["gpt2"], **small),
            bench.Plan(
                "llama_8b", "Llama-8B's tensors", llama, rounds["llama_8b"], in_a_row["llama_8b"], dtypes=bf16, **small
            ),
        ]
        if self.chosen.no_llama:
            plans.pop()
        for plan in plans:
            # The list of 8e9 parameters takes long to set up: nothing but what is compared with others.
            chosen = [c for c in entrants if plan.name != "llama_8b" or "_rn_" not in c.name]
            bench.race(plan, chosen, timer, clock, keep=functools.partial(self.keep, plan.name))
        if self.chosen.tune:
            self.tune(timer, rounds["tune"], clock)

    def keep(self, name: str, section: dict[str, Any]) -> None:
        from gpu import bench

        if not section["rows"] and self.data.get(name, {}).get("rows"):
            return  # nothing was measured: what an earlier run found stays
        self.data[name] = section
        self.data["targets"] = bench.judge(self.data)
        self.save()

    def compile_ahead(self, wanted: Sequence[tuple[str, Any]], clock: Any) -> None:
        """Kernels of these contenders and launch settings, on all cores: a process alone compiles for minutes."""
        from gpu import bench, jobs, workers

        if self.dry:
            return
        done = list(workers.each(bench.ahead, wanted, self.jobs, clock.until(AHEAD_SHARE).end, jobs.LONGEST))
        failed = [f"{job[0]}: {result.why}" for job, result in done if isinstance(result, workers.Lost)]
        clock.say(f"compiled ahead: {len(done) - len(failed)} of {len(wanted)}" + f"; {failed[0]}" * bool(failed))

    def tune(self, timer: Any, rounds: int, clock: Any) -> None:
        from gpu import bench, contenders

        entrants = [c for c in contenders.generated_contenders("triton") if "_rn_" not in c.name]
        settings = bench.tunings()
        if self.dry:
            entrants, settings = entrants[:1], settings[::9]
        self.compile_ahead([(c.name, setting) for c in entrants for setting in settings], clock)
        numel = 2**13 if self.dry else 2**28
        bench.tune(entrants, numel, rounds, timer, clock, settings, functools.partial(self.keep, "tune"))


if __name__ == "__main__":
    sys.exit(main())
