"""Checks and benchmarks of the generated kernels on this machine's GPU, in nine minutes.

    make gpu-check                            sets up .venv first
    python tools/gpu_check.py --minutes 9     every part, in this order; a second call goes on where the first ended
    python tools/gpu_check.py --only times    a part
    python tools/gpu_check.py --warm DIR      without a GPU: compile into DIR what a run launches, and write DIR.tar.xz;
                                              with one: begin with these kernels

The parts, and their share of nine minutes:

    bits    strict kernels of nine common rules under their plans, beside eager torch (2)
    times   beside torch's optimizers and other packages (4)
    memory  the peak of a training step of a billion parameters (1)
    modes   CUDA graphs, capturable steps, states in host memory (1)
    checks  the other tests marked `cuda`, until the minutes end

Tests run under pytest in processes of their own; times are taken in this one while no other process uses the GPU.

Writes docs/benchmarks/<device>_<date>.json, .md and _tests.jsonl as it goes: a run that is killed has lost what it was
at, and the next one begins there. The exit code is 0 where no check failed, 1 where one did or a part ended early, 2
for a wrong call; no figure changes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  # the imports that follow take seconds

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT),) if p not in sys.path]

import torch  # noqa: E402

from tools import warm  # noqa: E402
from tools.bench import memory, race  # noqa: E402
from tools.bench.race import BASE, FLAGSHIP, Contender  # noqa: E402
from tools.prose import table  # noqa: E402

MINUTES, GRACE = 9.0, 20.0
"""Minutes of a run, and the seconds that a GPU which does not answer is waited for beyond."""

PARTS = {"bits": 120.0, "times": 240.0, "memory": 60.0, "modes": 60.0, "checks": 540.0}
"""The parts of a run -> the seconds of nine minutes that one takes at most."""

CHECKS = ("tests/test_cuda.py", "tests/test_offload.py")
DRY = ("lion.fp32.float32", "adamw.int8_split24.bfloat16", "lamb.int8_split24.bfloat16")
"""Kernels that a dry run checks by default: of one sweep, with codes, of several."""

BROKEN = 70
"""Exit code of a process that checks whose CUDA context no longer answers: another goes on with what is left."""

JOBS = 16  # processes that check: each has a CUDA context of about half a GiB, and compiles on one core
TURN = 5.0  # seconds that one contender may take of a list


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the time of the whole run")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="some of the parts")
    parser.add_argument("--kernels", nargs="*", default=[], metavar="SPEC[.PLAN[.DTYPE]]", help="check only these")
    parser.add_argument("--warm", type=Path, metavar="DIR", help="a folder of kernels that were compiled without a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the reports")
    parser.add_argument("--jobs", type=int, default=0, help="processes that check or compile; 0: as the machine allows")
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
        return (
            "torch sees no GPU here (OPTGEN_EMULATE=90 with --device cpu tries the checks out by emulation, "
            "--warm DIR compiles for a GPU that is elsewhere)"
        )
    return None


def sources() -> str:
    """Return a hash of what kernels are made of: a run goes on only with the results of the same ones."""
    found = hashlib.sha256()
    for path in sorted(
        p for top in ("optgen", "specs") for p in (ROOT / top).rglob("*") if p.suffix in (".py", ".h", ".j2")
    ):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return test -> its outcome; a line that was cut short is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            row = json.loads(line)
            found[row["test"]] = row
    return found


class Run:
    """A run: its options, its clock, and the report as far as it has come."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.dry = asked, asked.device == "cpu"
        self.end = BEGAN + 60 * asked.minutes
        self.asked.kernels = asked.kernels or list(DRY) * self.dry
        self.machine = race.machine(asked.device) | {"sources": sources()}
        self.path: Path = asked.out / f"{race.slug(self.machine['device'])}_{self.machine['date']}.json"
        self.tests_path = self.path.with_name(f"{self.path.stem}_tests.jsonl")
        earlier, same = race.read(self.path), ("device", "date", "torch", "packages", "sources")
        kept = all(earlier.get("machine", {}).get(key) == self.machine[key] for key in same)
        rows = outcomes(self.tests_path).values() if kept else ()
        race.write(self.tests_path, "".join(json.dumps(row) + "\n" for row in rows))  # whole lines
        begun = {"sections": {}, "missing": {}, "memory": [], "symmetric": [], "left": {}}
        self.data: dict[str, Any] = earlier if kept else begun
        self.data["machine"] = self.machine
        self.workers: list[subprocess.Popen[bytes]] = []

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)

    # -- the report -----------------------------------------------------------------------------------------------

    def save(self) -> None:
        rows = outcomes(self.tests_path).values()
        self.failed = [row for row in rows if row["outcome"] == "failed"]
        passed = sum(row["outcome"] == "passed" for row in rows)
        words = f"{passed} checks passed, {len(self.failed)} failed"
        words += "".join(f"; {n} of `{part}` are left" for part, n in self.data["left"].items() if n)
        self.data["correctness"] = {"summary": words, "passed": passed, "failed": self.failed[:50]}
        lines = ["## Correctness", "", f"{words}.", "", *[f"- **{row['test']}**" for row in self.failed[:20]], ""]
        if peaks := sorted(self.data["memory"], key=lambda row: list(memory.WAYS).index(row["way"])):
            lines += [f"## Peak memory of a training step, {peaks[0]['parameters']:,} parameters", ""]
            cells = [
                [memory.WAYS[r["way"]], *(f"{r[k]:.2f}" for k in ("per_parameter", "first", "counted"))] for r in peaks
            ]
            lines += [*table(("bytes per parameter", "peak of a step", "of the first step", "counted"), cells), ""]
        if self.data["symmetric"]:
            cells = [[f"{r['matrices']}, up to {r['largest'][0]} x {r['largest'][1]}",
                      *(f"{1e6 * r[k]:.0f}" for k in ("torch", "triangles")), f"{r['apart']:.1e}"]
                     for r in self.data["symmetric"]]  # fmt: skip
            head = ("matrices", "torch, us", "triangles, us", "difference")
            lines += ["## Five rounds of Newton-Schulz", "", *table(head, cells), ""]
        self.data["checks"] = lines
        race.save(self.path, self.data)
        race.write(self.path.with_suffix(".md"), race.markdown(self.data))

    def give_up(self) -> None:
        """End a run that waits for a GPU which does not answer."""
        self.say(error := f"the GPU did not answer {GRACE:.0f} s after the end")
        self.data["error"] = error
        self.stop()
        self.save()
        os._exit(1)

    def run(self) -> int:
        watch = threading.Timer(self.end + GRACE - time.monotonic(), self.give_up)
        watch.daemon = True
        watch.start()
        for key in ("error", "output"):
            self.data.pop(key, None)
        parts = {"times": self.times, "memory": self.peaks}
        for name, seconds in PARTS.items():
            until = min(self.end, time.monotonic() + seconds * self.asked.minutes / MINUTES)
            if name not in self.asked.only or time.monotonic() >= self.end:
                continue
            self.say(f"{name}: at most {until - time.monotonic():.0f} s")
            try:
                parts[name](until) if name in parts else self.tests(name, until)
            except Exception as error:  # the parts after it are made all the same
                self.data["error"] = f"{name}: {type(error).__name__}: {error}"
                self.say(f"ended early: {self.data['error']}")
            self.save()
        watch.cancel()
        print("\n" + self.path.with_suffix(".md").read_text(encoding="utf-8"), flush=True)
        print(f"written: {self.path} and .md", flush=True)
        unchecked = not self.data["correctness"]["passed"] and {"bits", "modes", "checks"} & set(self.asked.only)
        return 1 if self.failed or unchecked or {"error", "output"} & set(self.data) else 0

    # -- times ----------------------------------------------------------------------------------------------------

    def times(self, until: float) -> None:
        ours = race.generated("triton")
        others, self.data["missing"] = race.peers("cuda")
        entrants = race.torch_s_own() + ours + others
        lists: dict[str, tuple[str, Any, int]] = {
            "tensor": ("One large tensor", [(10**9,)], 5),
            "matrix": ("One matrix", [(4096, 4096)], 10),
            "gpt2": ("GPT-2's tensors", race.gpt2(), 10),
            "llama_8b": ("Llama-8B's tensors", race.llama_8b(), 3),
        }
        rounds = 10
        if self.dry:  # emulation takes a tenth of a second for a launch, the interpreter milliseconds for an operation
            entrants = [c for c in entrants if c.name in (BASE, FLAGSHIP, f"{FLAGSHIP}, released", "LAMB int8_split24")]
            small = [(5000,)], [(3, 40)], race.gpt2(4, 1, 40, 8), race.llama_8b(4, 1, 8, 2, 40)
            lists = {name: (lists[name][0], shapes, 1) for name, shapes in zip(lists, small, strict=True)}
            rounds = 2
        elif not all(f"{name}, 1" in self.data["sections"] for name in lists):
            self.compile_ahead([c.name for c in ours], until)
        for name, (title, shapes, steps) in lists.items():
            if name == "tensor" and not self.dry:  # the largest that leaves room for those that are compared
                shapes = [(min(10**9, int(race.free_memory("cuda") / 30) // 1000 * 1000),)]
            chosen = [c for c in entrants if self.takes_part(c, name)]
            self.section(name, title, shapes, chosen, rounds if name != "llama_8b" else rounds // 3 or 1, steps, until)
        from tools.bench import symmetric

        of_gpt2 = [(768, 2304), (768, 768), (768, 3072), (768, 3072)] * 12
        for shapes in ([(4096, 4096)], of_gpt2) if not self.dry else ([(40, 72), (8, 64)],):
            if time.monotonic() < until and len(shapes) not in [row["matrices"] for row in self.data["symmetric"]]:
                self.data["symmetric"].append(symmetric.race(shapes, self.asked.device, 1 if self.dry else 10))
                self.save()

    def takes_part(self, c: Contender, name: str) -> bool:
        """Return True if a contender is timed over a list."""
        if name == "tensor" or (self.dry and name != "matrix"):  # a vector is not swept again
            return c.again == (0, 0, 0) and "released" not in c.name and "Muon" not in c.name
        if name == "llama_8b":  # in fp32, weights and states of 8e9 parameters fill the memory alone
            return (
                c.dtype == race.BF16 and c.again is not None and not any(x in c.name for x in ("_rn_", "int4", "Muon"))
            )
        # The factors of a matrix of 50257 rows take 10 GB.
        return not (name == "gpt2" and c.name.startswith("SOAP"))

    def section(
        self, name: str, title: str, shapes: Any, chosen: Sequence[Contender], rounds: int, steps: int, until: float
    ) -> None:
        """Time the contenders that an earlier run had no time for."""
        key, sections = f"{name}, 1", self.data["sections"]
        earlier = sections.get(key, {"rows": [], "left_out": {}})
        out = {name: why for name, why in earlier["left_out"].items() if why != race.NO_TIME}
        had = {row["name"] for row in earlier["rows"]}
        left = [c for c in chosen if c.name not in had | set(out)]
        if not left or time.monotonic() >= until:
            return

        def keep(found: race.Section) -> None:
            order = {c.name: k for k, c in enumerate(chosen)}
            rows = earlier["rows"] + [row for row in found["rows"] if row["name"] not in had]
            rows.sort(key=lambda row: order.get(row["name"], len(order)))  # of a package that was there then
            sections[key] = found | {"rows": rows, "left_out": out | found["left_out"]}
            self.save()

        again = [c for c in chosen if c in left or (c.name in (BASE, FLAGSHIP) and c.name in had)]
        keep(race.section(
            title, shapes, again, device=self.asked.device, threads=1, rounds=rounds, steps=steps, end=until,
            copied=2**16 if self.dry else 2**31, share=TURN, say=self.say, keep=keep,
        ))  # fmt: skip

    def compile_ahead(self, names: Sequence[str], until: float) -> None:
        """Compile what is timed into Triton's cache on disk, on all cores: one process takes minutes."""
        context = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
        jobs = min(self.asked.jobs or race.cores(), len(names))
        with ProcessPoolExecutor(jobs, context, race.end_with_parent) as pool:
            for done in [pool.submit(warm.compile_for, name) for name in names]:
                with suppress(Exception):  # the benchmark itself says what does not compile
                    done.result(max(0.0, until - time.monotonic()))
                done.cancel()
        self.say(f"compiled {len(names)} contenders")

    # -- memory ---------------------------------------------------------------------------------------------------

    def peaks(self, until: float) -> None:
        layers, width = (2, 128) if self.dry else (60, 4096)
        rows = self.data["memory"]
        for way in ("released", "ordinary", "torch"):
            left = until - time.monotonic()
            if left > 0 and way not in [row["way"] for row in rows]:
                with suppress(subprocess.TimeoutExpired):
                    rows.append(memory.run(way, layers, width, 3, left))
                    self.say(f"{memory.WAYS[way]}: {rows[-1]['per_parameter']:.2f} bytes per parameter")
                    self.save()

    # -- tests ----------------------------------------------------------------------------------------------------

    def tests(self, part: str, until: float) -> None:
        """Run the tests of a part that have no outcome yet."""
        jobs = self.asked.jobs or (1 if self.dry else min(race.cores(), JOBS))
        files = CHECKS[:1] if self.dry else CHECKS
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "cuda",
            "-p",
            "no:cacheprovider",
            "-p",
            "tools.check_worker",
            *files,
        ]
        before = len(outcomes(self.tests_path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
            environment = {
                **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OPTGEN_TEST_DEVICE": self.asked.device, "OPTGEN_TEST_KERNELS": " ".join(self.asked.kernels),
                "OPTGEN_CHECK_OUTCOMES": str(self.tests_path.resolve()), "OPTGEN_CHECK_CLAIMS": folder,
                "OPTGEN_CHECK_PART": part,
            }  # fmt: skip

            def start() -> None:
                self.workers.append(subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip

            for _ in range(jobs):
                start()
            saved = time.monotonic()
            while self.workers and time.monotonic() < until:
                time.sleep(0.2)
                for worker in [w for w in self.workers if w.poll() is not None]:
                    self.workers.remove(worker)
                    if worker.returncode not in (0, 1, 5):  # passed, failed, nothing to do
                        if self.lost(worker, Path(folder)):
                            start()
                        else:
                            self.data["output"] = Path(folder, "log").read_text(errors="replace")[-4000:]
                            self.say(f"a process that checks ended:\n{self.data['output']}")
                if time.monotonic() > saved + 5:
                    self.save()
                    saved = time.monotonic()
            self.stop()
            counts = [int(path.read_text() or 0) for path in Path(folder).glob("count-*")]
        made = len(outcomes(self.tests_path)) - before
        self.data["left"][part] = max([0, *counts]) - made
        self.save()
        self.say(f"{part}: {made} checks made, {self.data['left'][part]} left, {len(self.failed)} failed in all")

    def lost(self, worker: subprocess.Popen[bytes], folder: Path) -> bool:
        """Write the outcome of the test that a process died in; return True if another is to go on in its place."""
        done = outcomes(self.tests_path)
        for claim in folder.glob("claim-*"):
            pid, _, test = claim.read_text(encoding="utf-8").partition(" ")
            if int(pid or 0) == worker.pid and test not in done:
                row = {"test": test, "outcome": "failed", "text": f"the process ended with {worker.returncode}"}
                with self.tests_path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                return True
        return worker.returncode == BROKEN

    def stop(self) -> None:
        """End the processes that check, and what they have started."""
        for worker in self.workers:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait(10)
        self.workers.clear()


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    if asked.warm:
        os.environ |= warm.environment(asked.warm)
        if asked.device == "cuda" and not torch.cuda.is_available():
            return warm.fill(asked.warm, asked.kernels, asked.jobs, lambda text: print(text, flush=True))
        if warm.archive_of(asked.warm).exists() and not asked.warm.exists():
            print(f"{warm.unpack(asked.warm)} kernels of {warm.archive_of(asked.warm)}, cache key here {warm.key()}")
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
