"""Tests and benchmarks of the generated kernels on this machine's GPU.

    make gpu-check                            sets up .venv first; with a Python that has torch, just
    python3 tools/gpu_check.py                everything, under 8 minutes
    python3 tools/gpu_check.py --quick        default flags, fewer rounds
    python3 tools/gpu_check.py --tune         also which launch settings are fastest

Needs torch and Triton, and generated/ as committed; nothing of the compiler is imported.  Writes
docs/benchmarks/<device>_<date>.json after every section, and .md and .png at the end.  The exit code is 0 where
every kernel is correct, 1 where one is not or could not be checked, 2 for a wrong call; times never change it.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent

BUDGET = 450.0
CORRECTNESS_SHARE = 0.6  # of the budget, at most, where benchmarks follow
JOBS = 16  # processes that check: each has a CUDA context of about half a GiB, and compiles on one core
FULL = {"tensor": 30, "gpt2": 30, "llama_8b": 10, "tune": 9}
QUICK = {"tensor": 10, "gpt2": 10, "llama_8b": 5, "tune": 5}
DRY = {"tensor": 2, "gpt2": 2, "llama_8b": 2, "tune": 2}
DRY_ENTRANTS = ("AdamW int8_split24", "AdamW fp32", "torch fused AdamW fp32")


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
    return Check(chosen).run()


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

    def run(self) -> int:
        correct = True
        if self.chosen.only != "bench":
            correct = self.correctness()
        if self.chosen.only != "correctness":
            try:
                self.bench()
            except Exception as error:  # times must never decide
                self.data["bench_error"] = f"{type(error).__name__}: {error}"[:500]
                self.clock.say(f"benchmarks ended early: {self.data['bench_error']}")
                self.save()
        self.finish()
        return 0 if correct else 1

    def save(self) -> None:
        from gpu import report

        report.write_json(self.path, self.data)

    def finish(self) -> None:
        import json

        from gpu import report

        self.data["seconds"] = round(self.clock.elapsed, 1)
        image = self.path.with_suffix(".png")
        drawn = report.picture(self.data, image)
        text = report.markdown(self.data, image.name if drawn else None)
        self.path.with_suffix(".md").write_text(text, encoding="utf-8")
        self.save()
        print("\n" + text, flush=True)
        print(f"written: {self.path} and .md" + (" and .png" if drawn else ""), flush=True)
        if self.chosen.json:
            print(json.dumps(self.data, default=str), flush=True)

    # -- correctness --------------------------------------------------------------------------------------------

    def correctness(self) -> bool:
        from gpu import catalog

        cases = catalog.cases(self.chosen.kernels, quick=self.chosen.quick)
        started = self.clock.elapsed
        limit = self.chosen.budget * (1.0 if self.chosen.only == "correctness" else CORRECTNESS_SHARE)
        outcomes: dict[str, Any] = {}
        self.clock.say(f"correctness: {len(cases)} settings")
        for outcome in self.outcomes(cases, limit):
            outcomes[outcome.case] = outcome
            if outcome.problems:
                self.clock.say(f"FAILED {outcome.case}: {outcome.problems[0]}")
            if len(outcomes) % 40 == 0:
                self.clock.say(f"correctness: {len(outcomes)} of {len(cases)}")
                self.note_correctness(cases, outcomes, started)
        if self.chosen.huge:
            outcome = self.huge()
            outcomes[outcome.case] = outcome
        right = self.note_correctness(cases, outcomes, started)
        right = self.stages(limit - (self.clock.elapsed - started)) and right
        return self.graphs() and right

    def graphs(self) -> bool:
        """Steps captured in CUDA graphs and replayed."""
        import torch
        from gpu import graphs

        if self.chosen.kernels or self.dry:
            return True
        done = list(graphs.check(torch.device(self.chosen.device)))
        for outcome in done:
            if outcome.problems:
                self.clock.say(f"FAILED graph of {outcome.case}: {outcome.problems[0]}")
        self.data["graphs"] = [asdict(outcome) for outcome in done]
        self.save()
        right = sum(not outcome.problems for outcome in done)
        self.clock.say(f"CUDA graphs: {right} of {len(done)} give the bits of steps outside a graph")
        return right == len(done)

    def stages(self, limit: float) -> bool:
        """Rules of several sweeps, in the seconds that are left."""
        import torch
        from gpu import stages

        if self.chosen.kernels:
            return True
        done = []
        for outcome in stages.check(torch.device(self.chosen.device), max(limit, 0.2 * self.chosen.budget)):
            done.append(outcome)
            if outcome.problems:
                self.clock.say(f"FAILED {outcome.case}: {outcome.problems[0]}")
            self.data["stages"] = {
                "ran": len(done),
                "of": len(stages.settings()),
                "outcomes": [asdict(o) for o in done],
            }
            self.save()
        right = sum(not o.problems for o in done)
        self.clock.say(f"several sweeps: {right} of {len(done)} settings have the reference's bits")
        return right == len(done)

    def note_correctness(self, cases: Sequence[Any], outcomes: dict[str, Any], started: float) -> bool:
        """Writes what is known so far; whether all of it is right and complete."""
        missing = [str(case) for case in cases if str(case) not in outcomes]
        failed = [o for o in outcomes.values() if not o.ok]
        kernels = {name for o in outcomes.values() if o.ok for name in o.kernels}
        worst: dict[str, float] = {}
        for o in outcomes.values():
            for name, value in o.worst.items():
                key = f"{o.case}: {name}"
                worst[key] = max(worst.get(key, 0.0), value)
        elements = sum(o.elements for o in outcomes.values())
        words = f"{len(outcomes) - len(failed)} of {len(outcomes) + len(missing)} settings agree with the reference"
        words += f": {len(kernels)} kernels, {elements:,} elements compared"
        words += f"; {len(failed)} failed" * bool(failed) + f"; {len(missing)} not run" * bool(missing) + "."
        self.data["correctness"] = {
            "summary": words,
            "ok": not failed and not missing and bool(cases),
            "quick": self.chosen.quick,
            "failed": [asdict(o) for o in failed],
            "not_run": missing,
            "worst": dict(sorted(worst.items(), key=lambda item: -item[1])[:40]),
            "outcomes": [asdict(o) for o in outcomes.values()],
            "seconds": round(self.clock.elapsed - started, 1),
        }
        self.save()
        if len(outcomes) >= len(cases):
            self.clock.say(f"correctness: {words}")
        return bool(self.data["correctness"]["ok"])

    def outcomes(self, cases: Sequence[Any], limit: float) -> Iterator[Any]:
        """Each case's outcome as it comes; what a broken process could not run is given to fresh ones, twice."""
        from gpu import correct

        check = functools.partial(correct.check, device_name=self.chosen.device, tiny=self.dry)
        if self.jobs == 1:
            for case in cases:
                if self.clock.elapsed > limit:
                    return
                yield check(case)
            return
        again: list[Any] = list(cases)
        for jobs in (self.jobs, self.jobs, 1):
            with self.pool(jobs) as pool:
                running = {pool.submit(check, case): case for case in again}
                again = []
                try:
                    for future in as_completed(running, timeout=max(limit - self.clock.elapsed, 1.0)):
                        error = future.exception()
                        if error is not None or future.result().retry:
                            again.append(running[future])
                        else:
                            yield future.result()
                except TimeoutError:
                    self.clock.say("correctness: no time left")
                    return
            if not again:
                return
        for case in again:
            yield correct.Outcome(str(case), problems=["the process that ran it ended"])

    @property
    def jobs(self) -> int:
        from gpu import machine

        return self.chosen.jobs or (1 if self.dry else min(machine.cores(), JOBS))

    @contextmanager
    def pool(self, jobs: int) -> Iterator[ProcessPoolExecutor]:
        """Processes with a CUDA context each; those still busy at the end are ended."""
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(list(sys.path),),
        )
        try:
            yield pool
        finally:
            workers = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(5)

    def huge(self) -> Any:
        import torch
        from gpu import correct

        case = correct.huge_case()
        if case is None:
            return correct.Outcome("huge", problems=["no plan without random numbers was built"])
        numel = {"numel": 2**14 + 17} if self.dry else {}
        try:
            outcome = correct.check_huge(torch.device(self.chosen.device), case, **numel)
        except Exception as error:
            outcome = correct.Outcome(f"{case}, huge", problems=[f"{type(error).__name__}: {error}"[:500]])
        self.clock.say(f"{outcome.case}: {'; '.join(outcome.problems) or 'right'}")
        return outcome

    # -- benchmarks ---------------------------------------------------------------------------------------------

    def bench(self) -> None:
        import torch
        from gpu import bench, contenders, shapes

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
            self.data[plan.name] = bench.race(plan, chosen, timer, self.clock)
            self.data["targets"] = bench.judge(self.data)
            self.save()
        if self.chosen.tune:
            self.tune(timer, rounds["tune"])

    def tune(self, timer: Any, rounds: int) -> None:
        from gpu import bench, contenders

        entrants = [c for c in contenders.generated_contenders("triton") if "_rn_" not in c.name]
        settings = bench.tunings()
        if self.dry:
            entrants, settings = entrants[:1], settings[::9]
        if not self.dry:
            with self.pool(self.jobs) as pool:
                jobs = [pool.submit(_compile_ahead, c.name, setting) for c in entrants for setting in (None, *settings)]
                for job in jobs:
                    job.exception(timeout=max(self.clock.left, 1.0))
            self.clock.say("launch settings: compiled")
        numel = 2**13 if self.dry else 2**28
        self.data["tune"] = bench.tune(entrants, numel, rounds, timer, self.clock, settings)
        self.save()


def _start_worker(paths: list[str]) -> None:
    """A process that checks: one thread, because there is one per core, and the same packages as its parent."""
    sys.path[:] = paths
    import torch

    torch.set_num_threads(1)


def _compile_ahead(name: str, setting: Any) -> None:
    import torch
    from gpu import bench, contenders

    found: Callable[[], contenders.Contender] = lambda: next(  # noqa: E731
        c for c in contenders.generated_contenders("triton") if c.name == name
    )
    bench.compile_ahead(found, setting, torch.device("cuda"))


if __name__ == "__main__":
    sys.exit(main())
