"""Benchmarks and tests of the generated kernels on this machine's GPU.

    make gpu-check                            sets up .venv first
    python tools/gpu_check.py                 both halves, of at most 9 minutes each
    python tools/gpu_check.py --only bench    a half; the other is --only correctness
    python tools/gpu_check.py --all           every check, of which one of three is drawn otherwise
    python tools/gpu_check.py --quick         default flags, fewer rounds

Benchmarks come first, in this process, whose CUDA context nothing has harmed yet. Then the tests marked `cuda` run
under pytest (tests/test_cuda.py and others), in processes of their own.

Writes docs/benchmarks/<device>_<date>.json and .md as it goes; two runs on one day, each of one half, make one report.
The exit code is 0 where every kernel is correct, 1 where one is not or could not be checked, 2 for a wrong call; times
never change it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT),) if p not in sys.path]

import torch  # noqa: E402

from tools.bench import race  # noqa: E402
from tools.bench.race import BASE, FLAGSHIP, Contender  # noqa: E402

BUDGET, GRACE = 480.0, 60.0
"""Seconds after which a half starts nothing new, and those that a GPU which does not answer is waited for beyond."""

CHECKS = ("tests/test_cuda.py", "tests/test_offload.py")
HUGE = "tests/test_cuda.py::test_a_tensor_of_more_than_2_to_the_31_elements"
DRY = ("lion.fp32.float32", "adamw.int8_split24.bfloat16", "lamb.int8_split24.bfloat16")
"""Kernels that a dry run checks by default: of one sweep, with codes, of several."""

JOBS = 16  # processes that check: each has a CUDA context of about half a GiB, and compiles on one core


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("correctness", "bench"), help="one half of it")
    parser.add_argument("--quick", action="store_true", help="default flags only, fewer rounds")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="SPEC[.PLAN[.DTYPE]]", help="check only these")
    parser.add_argument("--all", action="store_true", help="check every cell: the others are sampled by default")
    parser.add_argument("--seed", type=int, help="which of three samples is checked (default: the day's)")
    parser.add_argument("--huge", action="store_true", help="also a tensor of more than 2^31 elements (20 GiB)")
    parser.add_argument("--no-llama", action="store_true", help="leave out the 8B list (60 to 120 GiB)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the reports")
    parser.add_argument("--json", action="store_true", help="print the report as JSON on the last line")
    parser.add_argument("--jobs", type=int, default=0, help="processes that check; 0: as the machine allows")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which a half starts nothing new")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="a folder with further packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run without a GPU")
    return parser.parse_args(given)


def unusable(device: str) -> str | None:
    """Return why nothing can be run here, None where it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cpu" and interpreted == ("OPTGEN_EMULATE" in os.environ):
        return "--device cpu is a dry run: set OPTGEN_EMULATE=90, or for Triton's interpreter TRITON_INTERPRET=1"
    if device == "cuda" and interpreted:
        return "TRITON_INTERPRET=1 is set: kernels would not run on the GPU; unset it, or use --device cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU here (OPTGEN_EMULATE=90 with --device cpu tries the checks out by emulation)"
    return None


class Run:
    """A run: its options, its clock, and the report as far as it has come."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.dry, self.began = asked, asked.device == "cpu", time.monotonic()
        self.seed = datetime.date.today().toordinal() % 3 if asked.seed is None else asked.seed
        self.asked.kernels = asked.kernels or list(DRY) * self.dry
        self.machine = race.machine(asked.device)
        self.path: Path = asked.out / f"{race.slug(self.machine['device'])}_{self.machine['date']}.json"
        earlier, same = race.read(self.path), ("device", "date", "torch", "packages")
        kept = all(earlier.get("machine", {}).get(key) == self.machine[key] for key in same)
        self.data: dict[str, Any] = earlier if kept else {"sections": {}, "missing": {}}
        self.data["machine"] = self.machine

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        self.data["seconds"] = round(time.monotonic() - self.began, 1)
        race.save(self.path, self.data)
        race.write(self.path.with_suffix(".md"), race.markdown(self.data))

    def give_up(self) -> None:
        """End a run that waits for a GPU which does not answer."""
        self.data["bench_error"] = f"the GPU still did not answer {GRACE:.0f} s after the end of the budget"
        self.save()
        os._exit(1)

    @contextmanager
    def half(self) -> Iterator[None]:
        """Give what is inside a budget of its own, and write the report."""
        self.end = time.monotonic() + self.asked.budget
        watch = threading.Timer(self.asked.budget + GRACE, self.give_up)
        watch.daemon = True
        watch.start()
        yield
        self.save()
        watch.cancel()

    def run(self) -> int:
        right = True
        if self.asked.only != "correctness":
            self.data.pop("bench_error", None)
            with self.half():
                try:
                    self.bench()
                except Exception as error:  # times never decide, and what was measured is written
                    self.data["bench_error"] = f"{type(error).__name__}: {error}"
                    self.say(f"benchmarks ended early: {self.data['bench_error']}")
        if self.asked.only != "bench":
            with self.half():
                right = self.check()
        print("\n" + self.path.with_suffix(".md").read_text(encoding="utf-8"), flush=True)
        print(f"written: {self.path} and .md", flush=True)
        if self.asked.json:
            print(json.dumps(self.data, default=str), flush=True)
        return 0 if right else 1

    # -- benchmarks -----------------------------------------------------------------------------------------------

    def bench(self) -> None:
        ours = race.generated("triton")
        if not self.dry:
            self.compile_ahead([c.name for c in ours])
        others, self.data["missing"] = race.peers("cuda")
        entrants = race.torch_s_own() + ours + others
        rounds = 10 if self.asked.quick else 30
        lists: dict[str, tuple[str, Any, int]] = {
            "tensor": ("One large tensor", [(10**9,)], 1),
            "matrix": ("One matrix", [(4096, 4096)], 10),
            "gpt2": ("GPT-2's tensors", race.gpt2(), 10),
            "llama_8b": ("Llama-8B's tensors", race.llama_8b(), 3),
        }
        if self.dry:  # emulation takes a tenth of a second for a launch, the interpreter milliseconds for an operation
            entrants = [c for c in entrants if c.name in (BASE, FLAGSHIP, f"{FLAGSHIP}, released", "LAMB int8_split24")]
            small = [(5000,)], [(3, 40)], race.gpt2(4, 1, 40, 8), race.llama_8b(4, 1, 8, 2, 40)
            lists = {name: (lists[name][0], shapes, 1) for name, shapes in zip(lists, small, strict=True)}
            rounds = 2
        if self.asked.no_llama:
            del lists["llama_8b"]
        for name, (title, shapes, steps) in lists.items():
            if name == "tensor" and not self.dry:  # the largest that leaves room for those that are compared
                per = sum(16 if c.dtype == race.FP32 else 9 for c in entrants[:1] + ours[:1])
                shapes = [(min(10**9, int(race.free_memory("cuda") / per) // 1000 * 1000),)]
            # In fp32, weights and states of 8e9 parameters fill the memory alone.
            chosen = [c for c in entrants if name != "llama_8b" or (c.dtype == race.BF16 and "_rn_" not in c.name)]
            if name == "tensor" or (self.dry and name != "matrix"):  # a vector is not swept again
                chosen = [c for c in chosen if not c.again and "released" not in c.name]
            self.section(name, title, shapes, chosen, rounds if name != "llama_8b" else rounds // 3 or 1, steps)

    def section(
        self, name: str, title: str, shapes: Any, entrants: Sequence[Contender], rounds: int, steps: int
    ) -> None:
        copied = 2**16 if self.dry else 2**31
        found = race.section(
            title, shapes, entrants, device=self.asked.device, threads=1, rounds=rounds, steps=steps, copied=copied,
            end=self.end, say=self.say,
        )  # fmt: skip
        sections = self.data["sections"]
        if found["rows"] or f"{name}, 1" not in sections:  # where nothing was measured, what was found before stays
            sections[f"{name}, 1"] = found
        self.save()

    def compile_ahead(self, names: Sequence[str]) -> None:
        """Compile what is timed into Triton's cache on disk, on all cores: one process takes minutes."""
        context = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
        with ProcessPoolExecutor(min(race.cores(), len(names)), context) as pool:
            for name, done in [(name, pool.submit(compile_for, name)) for name in names]:
                with suppress(Exception):  # the benchmark itself says what does not compile
                    done.result()
                    self.say(f"compiled {name}")

    # -- correctness ----------------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Run the tests marked `cuda` until the budget ends; return whether all ran and passed."""
        jobs = self.asked.jobs or (1 if self.dry else min(race.cores(), JOBS))
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OPTGEN_TEST_DEVICE": self.asked.device, "OPTGEN_TEST_KERNELS": " ".join(self.asked.kernels),
            "OPTGEN_TEST_QUICK": "1" * self.asked.quick,
            "OPTGEN_TEST_SEED": "" if self.asked.all or self.asked.kernels else str(self.seed),
        }  # fmt: skip
        files = CHECKS[:1] if self.asked.kernels or self.dry else CHECKS
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-vv", "-rfE", "-n", str(jobs), *files]
        command += [] if self.asked.huge else ["--deselect", HUGE]
        outcomes: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "SKIPPED": []}
        lines: list[str] = []
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        ended = threading.Event()

        def stop() -> None:
            ended.set()
            os.killpg(process.pid, signal.SIGKILL)

        watch = threading.Timer(max(self.end - time.monotonic(), 0.0), stop)
        watch.start()
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if found := re.match(r"\[gw\d+\].*?(PASSED|FAILED|SKIPPED) (\S+)", line):
                outcomes[found[1]].append(found[2])
                if found[1] == "FAILED":
                    self.say(line.rstrip())
        watch.cancel()
        complete = process.wait() in (0, 1) and not ended.is_set()
        passed, failed = len(outcomes["PASSED"]), outcomes["FAILED"]
        words = f"{passed} tests passed, {len(failed)} failed"
        if environment["OPTGEN_TEST_SEED"]:
            words += f" (seed {self.seed % 3} of 3: --seed has the others, --all all)"
        if not complete:
            count = next((int(x[1]) for line in lines if (x := re.search(r"workers? \[(\d+) items", line))), 0)
            words += f"; {count - sum(map(len, outcomes.values()))} had not ended with the budget"
        ok = complete and passed > 0 and process.returncode == 0
        output = [] if ok else lines[-200:]
        self.data["correctness"] = {"summary": words, "ok": ok, "outcomes": outcomes, "output": output}
        self.data["checks"] = ["## Correctness", "", f"{words}.", "", *[f"- **{name}**" for name in failed[:20]], ""]
        self.say(f"correctness: {words}")
        return ok


def compile_for(name: str) -> None:
    """Step large and small tensors once, from whatever process."""
    contender = next(c for c in race.generated("triton") if c.name == name)
    contender.build([torch.zeros(n, dtype=contender.dtype, device="cuda") for n in (4096, 64)]).step()
    torch.cuda.synchronize()


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    if problem := unusable(asked.device):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if asked.device == "cpu" and "OPTGEN_EMULATE" in os.environ:
        from tests.ptx import driver

        driver.install(int(os.environ["OPTGEN_EMULATE"]))
    sys.path += map(str, asked.peers)
    return Run(asked).run()


if __name__ == "__main__":
    sys.exit(main())
