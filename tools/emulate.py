"""Execute the compiled Triton kernels of drawn cells on the CPU (tests/ptx), and compare them with the eager reference.

`tools/test_full.py --only ptx` starts this file once for each version of Triton, writes cells to it as lines of JSON
and reads their results: each cell is a whole optimizer in strict maths, trained for a few steps through the runtime.
Results of matrix functions come from torch, as on a device.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import rich.progress  # noqa: E402
from prose import table  # noqa: E402

from tests import product  # noqa: E402
from tests.product import Cell  # noqa: E402

OLDEST = Path(sys.prefix) / "oldest"  # the oldest Triton that is supported, by `make setup`
TRITONS = {"3.9": "", "3.6": str(OLDEST)}
"""Versions of Triton, and the folder that comes before others on the path of modules."""

CAPABILITIES = (90, 80, 90, 100)
"""The GPUs that the cells are compiled for, drawn."""

WRAPPED = (
    "adagc(adamw)", "agc(sgd)", "asam(sgd)", "averaged(nadam)", "cautious(lamb)", "cautious_decay(lion)",
    "centralized(radam)", "clipped(adamw)", "clipped_value(lion)", "ema(cautious(adamw))", "ema_nesterov(adamw)",
    "gpa(sgd)", "grams(adamw)", "gsam(lion)", "hyperball(muon)", "lookahead(rmsprop)", "mars(adam)", "orthograd(sgd)",
    "sam(adamw)", "schedule_free(adamw)", "snoo(sgd)", "spam_reset(adamw)", "warmed_up(adafactor)", "zclip(sgd)",
)  # fmt: skip
"""Every wrapper, each around one rule."""

FULL_TILES = ((8, 512),)
STEPS = 2
TASKS = 32
"""Cells of a process, before another takes its place: loaded kernels are never given back."""


@dataclass(frozen=True)
class Job:
    """A cell for a version of Triton and a device."""

    cell: Cell
    triton: str
    capability: int

    def __str__(self) -> str:
        return f"{self.cell} by Triton {self.triton} for sm_{self.capability}"


def drawn(seed: int) -> list[Job]:
    """Return cells of every rule and wrapper, one by each version of Triton, in the order in which they are run.

    What is drawn for a rule depends on it, the plans and the seed alone: a new rule adds its cells, and those of others
    keep their results.
    """
    jobs: dict[str, list[Job]] = {triton: [] for triton in TRITONS}
    for rule in sorted((*product.WITH_MATRICES, *WRAPPED), key=lambda rule: _hash(seed, rule)):
        plans = sorted(product.PLANS, key=lambda plan: _hash(seed, rule, plan))
        fitting = (p for p in plans if rule in product.SPECS or not product.refusal(rule, p))
        for triton, plan in zip(TRITONS, fitting, strict=False):
            cells = [c for c in product.cells_of(rule, plan) if product.fitting(c, SHAPES)]
            draw = random.Random(_hash(seed, rule, triton))
            jobs[triton].append(Job(draw.choice(cells), triton, draw.choice(CAPABILITIES)))
    return [job for by in jobs.values() for job in by]


def _hash(*words: object) -> int:
    return zlib.crc32(" ".join(map(str, words)).encode())


SHAPES = product.SHAPES + product.REDUCED + FULL_TILES


# The process that emulates --------------------------------------------------------------------------------------------


def emulate(cell: Cell, capability: int) -> dict[str, Any]:
    """Train a cell; return how many kernels were compiled, how many launched, and what is wrong."""
    from tests.ptx import driver, scan

    driver.use(capability)
    before, launches = set(driver.LOADED), sum(x.launches for x in driver.LOADED.values())
    with tempfile.TemporaryDirectory() as folder:
        try:
            wrong = product.differing(cell, Path(folder), STEPS, ("triton",), SHAPES)
        except Exception as error:  # any failure belongs into the report, with its cell
            wrong = [f"{type(error).__name__}: {error}".splitlines()[0][:300]]
    new = {key: x for key, x in driver.LOADED.items() if key not in before}
    for x in new.values():
        found = scan.of_ptx(x.ptx)
        if x.cubin:
            found += scan.of_machine_code(x.ptx, x.tool("nvdisasm", "-c"))
        wrong += [f"{x.kernel.name}: {word}" for word in found]
    return {
        "kernels": len(new), "launches": sum(x.launches for x in driver.LOADED.values()) - launches, "wrong": wrong,
    }  # fmt: skip


def serve() -> None:
    """Answer cells from the standard input."""
    import torch

    from tests.ptx import driver

    torch.set_num_threads(1)
    driver.install()
    driver.races, driver.assembled = True, 4
    for line in sys.stdin:
        words, capability = json.loads(line)
        words["flags"] = tuple((name, on) for name, on in words["flags"])
        print(json.dumps(emulate(Cell(**words), capability)), flush=True)


# The process that reports ---------------------------------------------------------------------------------------------


class Server:
    """A process with a version of Triton, and a cache of what it compiles (see `driver.assembled`)."""

    def __init__(self, triton: str) -> None:
        self.triton, self.asked, self.cache = triton, 0, tempfile.TemporaryDirectory()
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [TRITONS[triton], env.get("PYTHONPATH", "")]))}
        env |= {"TRITON_CACHE_DIR": self.cache.name}
        command = [sys.executable, "-W", "ignore", __file__]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a cell, None if the process has died."""
        assert self.process.stdin and self.process.stdout
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps([asdict(job.cell), job.capability]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer.strip() else None

    def close(self) -> None:
        self.process.communicate()
        self.cache.cleanup()


def run(
    jobs: Sequence[Job], processes: int, goes_on: Callable[[], bool], keep: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Run jobs in so many processes while `goes_on`; a process that dies yields a result that says so."""
    rest, alone = iter(jobs), threading.Lock()

    def work(bar: rich.progress.Progress, task: Any) -> None:
        server = None
        while goes_on():
            with alone:
                job = next(rest, None)
            if job is None:
                break
            if server and (server.triton != job.triton or server.asked == TASKS):
                server.close()
                server = None
            server = server or Server(job.triton)
            found = server.ask(job)
            if found is None:
                server.close()
                server = None
            with alone:
                keep(job, found or {"kernels": 0, "launches": 0, "wrong": [DIED]})
            bar.advance(task)
        if server:
            server.close()

    with rich.progress.Progress() as bar:
        task = bar.add_task("emulated cells", total=len(jobs))
        threads = [threading.Thread(target=work, args=(bar, task)) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


DIED = "a process died while it ran"


class Results:
    """The last results of cells, a line each: kept in docs/, so that a run goes on where any checkout's last one ended.

    state   digest of the sources that run; results of others count until their cells are run again
    commit  what these are called
    """

    def __init__(self, path: Path, state: str, commit: str, fresh: bool = False) -> None:
        self.path, self.state, self.commit = path, state, commit
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists() and not fresh:
            self.known = json.loads(path.read_text(encoding="utf-8"))

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self.known[str(job)] = {**result, "commit": self.commit, "state": self.state}
        lines = (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(self.known.items()))
        made = self.path.with_suffix(".new")
        made.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        os.replace(made, self.path)

    def rest(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs to run: those without a result, then those that are wrong or right by other sources."""
        known = {job: x for job in jobs if (x := self.known.get(str(job))) and x["wrong"] != [DIED]}
        older = [job for job, x in known.items() if x["state"] != self.state]
        return [job for job in jobs if job not in known] + sorted(older, key=lambda job: not failures(job, known[job]))


def failures(job: Job, result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a cell, but for additions that the assembler of CUDA 12.9 fuses (docs/kernels.md)."""
    known = r".*( FADD for .*|: FFMA2)" if (job.triton, job.capability) == ("3.6", 100) else "(?!)"
    return [word for word in result["wrong"] if not re.fullmatch(known, word)]


def report(found: dict[Job, dict[str, Any]], jobs: Sequence[Job], seed: int) -> str:
    """Return docs/test-full-ptx.md."""
    from tests.ptx.emulated import DEFECTS, KINDS

    kernels, launches = (sum(x[name] for x in found.values()) for name in ("kernels", "launches"))
    right = sum(not failures(job, x) for job, x in found.items())
    fused = sum(failures(job, x) != x["wrong"] for job, x in found.items())
    rules, plans = (Counter(getattr(job.cell, name) for job in found) for name in ("spec", "plan"))
    twice = [sum(n > 1 for n in x.values()) for x in (rules, plans)]
    commits = ", ".join(f"{name} ({n} cells)" for name, n in Counter(x["commit"] for x in found.values()).most_common())
    lines = [
        "# Compiled kernels, executed without a device", "",
        "Written by `python tools/test_full.py --only ptx`. Cells (a rule under a plan, one parameter dtype, one",
        "setting of its flags) are drawn; each is compiled in strict maths by Triton, its PTX is executed on the CPU",
        "by the emulator of tests/ptx, and the weights and states of the whole optimizer are compared with the eager",
        f"reference, bit by bit, after {STEPS} steps on tensors of shapes",
        f"{', '.join(map(str, SHAPES))}. Every launch is searched for races.",
        "The text of every kernel is scanned, and the machine code of every fourth, drawn:",
        "[what this covers](kernels.md#executed-without-a-device). For sm_100",
        f"the assembler of Triton 3.6 fused sums that it must not in {fused} cells, which count as right here.", "",
        f"**{right} of {len(found)} cells are right**: {kernels} compiled kernels in {launches} launches, of",
        f"{len(rules)} rules (of {len(product.WITH_MATRICES)} and {len(WRAPPED)} that are wrapped; {twice[0]} of them",
        f"twice) under {len(plans)} plans (of {len(product.PLANS)}; {twice[1]} twice or more).",
        f"{len(jobs)} cells are drawn by seed {seed}, for each rule one by each version of Triton. A run goes on from",
        f"`docs/test-full-ptx.json`, and with results of older sources last. Commits: {commits}.", "",
        *table(["Triton", "target", "cells right", "kernels", "launches"], _rows(found)),
    ]  # fmt: skip
    wrong = [f"- {job}: {'; '.join(words[:4])}" for job, x in found.items() if (words := failures(job, x))]
    lines += ["", "## What fails", "", *wrong] if wrong else []
    lines += [
        "", "## Seeded changes", "",
        f"`tests/test_ptx.py` changes the PTX of AdamW's kernels in {len(DEFECTS)} ways. Each is noticed by",
        "executing it, by the scan of its text, or by both.", "",
        *table(["change", "plan", "noticed by"], _seeded(DEFECTS, KINDS)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _seeded(defects: dict[str, tuple[str, str, str, str]], kinds: dict[str, tuple[str, str]]) -> Iterator[list[object]]:
    for name, (kind, _, _, by) in defects.items():
        yield [name, ", ".join(kinds[kind]), by.replace("run", "execution").replace(" ", ", ")]


def _rows(found: dict[Job, dict[str, Any]]) -> Iterator[list[object]]:
    for triton in TRITONS:
        for capability in sorted(set(CAPABILITIES)):
            own = {job: x for job, x in found.items() if (job.triton, job.capability) == (triton, capability)}
            right = sum(not failures(job, x) for job, x in own.items())
            sums = [sum(x[name] for x in own.values()) for name in ("kernels", "launches")]
            yield [triton, f"sm_{capability}", f"{right} / {len(own)}", *sums]


def goes_on(until: float, stopped: threading.Event) -> Callable[[], bool]:
    """Return what says whether another cell may be begun."""
    return lambda: time.monotonic() < until and not stopped.is_set()


if __name__ == "__main__":
    serve()
