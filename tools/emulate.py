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
"""The GPUs that the cells are compiled for, in turn."""

FULL_TILES = ((8, 512),)
STEPS, TURNS = 2, 2


@dataclass(frozen=True)
class Job:
    """A cell for a version of Triton and a device."""

    cell: Cell
    triton: str
    capability: int

    def __str__(self) -> str:
        return f"{self.cell} by Triton {self.triton} for sm_{self.capability}"


def drawn(seed: int) -> list[Job]:
    """Return cells, a drawn one of each pair: every rule in each turn, with the plans in turn."""
    draw, jobs = random.Random(seed), []
    for _ in range(TURNS):
        rules, plans = list(product.WITH_MATRICES), list(product.PLANS)
        draw.shuffle(rules)
        draw.shuffle(plans)
        for k, rule in enumerate(rules):
            ordered = [plans[(k + by) % len(plans)] for by in range(len(plans))]
            plan = next(p for p in ordered if rule in product.SPECS or not product.refusal(rule, p))
            cells = [c for c in product.cells_of(rule, plan) if product.fitting(c, SHAPES)]
            which = len(jobs)
            jobs.append(Job(draw.choice(cells), list(TRITONS)[which // 4 % 2], CAPABILITIES[which % 4]))
    return jobs


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
    for key, x in new.items():
        found = scan.of_ptx(x.ptx)
        if zlib.crc32(key.encode()) % 4 == 0:  # of some also the machine code
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
    driver.races = True
    for line in sys.stdin:
        words, capability = json.loads(line)
        words["flags"] = tuple((name, on) for name, on in words["flags"])
        print(json.dumps(emulate(Cell(**words), capability)), flush=True)


# The process that reports ---------------------------------------------------------------------------------------------


class Server:
    """A process with a version of Triton."""

    def __init__(self, triton: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, [TRITONS[triton], env.get("PYTHONPATH", "")]))}
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a cell, None if the process has died."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps([asdict(job.cell), job.capability]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer.strip() else None

    def close(self) -> None:
        self.process.communicate()


def run(
    jobs: Sequence[Job], processes: int, goes_on: Callable[[], bool], keep: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Run jobs, the versions of Triton beside each other, while `goes_on`; the results of processes that die are not
    kept, so that the next run tries them again."""
    places = threading.Semaphore(processes)

    def of_one(triton: str, bar: rich.progress.Progress, task: Any) -> None:
        server = None
        for job in (x for x in jobs if x.triton == triton):
            with places:
                if not goes_on():
                    break
                server = server or Server(triton)
                found = server.ask(job)
            bar.advance(task)
            if found is None:
                server.close()
                server = None
            keep(job, found or {"kernels": 0, "launches": 0, "wrong": ["a process died while it ran"]})
        if server:
            server.close()

    with rich.progress.Progress() as bar:
        task = bar.add_task("emulated cells", total=len(jobs))
        threads = [threading.Thread(target=of_one, args=(t, bar, task)) for t in TRITONS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def failures(job: Job, result: dict[str, Any]) -> list[str]:
    """Return what is wrong with a cell, but for additions that the assembler of CUDA 12.9 fuses (docs/kernels.md)."""
    known = r".*( FADD for .*|: FFMA2)" if (job.triton, job.capability) == ("3.6", 100) else "(?!)"
    return [word for word in result["wrong"] if not re.fullmatch(known, word)]


def report(found: dict[Job, dict[str, Any]], jobs: Sequence[Job], seed: int, commit: str) -> str:
    """Return docs/test-full-ptx.md."""
    from tests.ptx.emulated import DEFECTS, KINDS

    kernels, launches = (sum(x[name] for x in found.values()) for name in ("kernels", "launches"))
    right = sum(not failures(job, x) for job, x in found.items())
    fused = sum(failures(job, x) != x["wrong"] for job, x in found.items())
    rules, plans = (Counter(getattr(job.cell, name) for job in found) for name in ("spec", "plan"))
    twice = [sum(n > 1 for n in x.values()) for x in (rules, plans)]
    lines = [
        "# Compiled kernels, executed without a device", "",
        "Written by `python tools/test_full.py --only ptx`. Cells (a rule under a plan, one parameter dtype, one",
        "setting of its flags) are drawn; each is compiled in strict maths by Triton, its PTX is executed on the CPU",
        "by the emulator of tests/ptx, and the weights and states of the whole optimizer are compared with the eager",
        f"reference, bit by bit, after {STEPS} steps on tensors of shapes",
        f"{', '.join(map(str, SHAPES))}. Every launch is searched for races.",
        "The text of every kernel is scanned, and the machine code of every fourth:",
        "[what this covers](kernels.md#executed-without-a-device). For sm_100",
        f"the assembler of Triton 3.6 fused sums that it must not in {fused} cells, which count as right here.", "",
        f"**{right} of {len(found)} cells are right**: {kernels} compiled kernels in {launches} launches, of",
        f"{len(rules)} rules (of {len(product.WITH_MATRICES)}; {twice[0]} of them twice) under {len(plans)} plans (of",
        f"{len(product.PLANS)}; {twice[1]} twice or more).",
        f"{len(jobs)} cells were drawn by seed {seed}. That was commit {commit}.", "",
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
