"""What is checked, as jobs for processes of their own: what of it comes first, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu import catalog, correct, graphs, moves, stages

LONGEST = 200.0
"""Seconds that a job may take, its process' start included: AdamW under int8_split24 compiles some 20 kernels of up to
4 s each."""

PARTS: dict[str, Callable[..., Any]] = {
    "correctness": correct.Outcome,
    "stages": stages.Staged,
    "graphs": graphs.Graph,
    "moves": moves.Move,
}
"""Section of the report -> what becomes of one of its jobs: `case`, `problems` and more."""


@dataclass(frozen=True)
class Job:
    """A call in another process.

    part    the section of the report that its outcome goes to
    urgent  jobs of smaller numbers begin first
    """

    part: str
    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    urgent: int

    def failed(self, why: str) -> Any:
        """The outcome where the call gave none."""
        return PARTS[self.part](self.case, problems=[why])


def run(job: Job) -> tuple[Any, bool]:
    """(outcome, whether its process may go on): not where the job has cost it its CUDA context."""
    torch.set_num_threads(1)  # there is a process per core
    outcome = job.function(*job.arguments)
    return outcome, not outcome.problems or alive()


def alive() -> bool:
    """Whether CUDA still answers in this process, where it is used."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").add_(1).item()
    except Exception:  # whatever it is, the answer is no
        return False
    return True


def of_cases(cases: Sequence[catalog.Case], device: str, tiny: bool) -> list[Job]:
    def urgent(case: catalog.Case) -> int:
        return 4 if not case.usual else 0 if case.spec in catalog.FIRST else 2

    return [Job("correctness", str(case), correct.check, (case, device, tiny), urgent(case)) for case in cases]


def of_huge(case: catalog.Case, device: str, numel: int) -> Job:
    return Job("correctness", correct.name_of_huge(case, numel), correct.check_huge, (case, device, numel), 1)


def of_stages(device: str) -> list[Job]:
    """Rules of several sweeps, and packed codes."""
    return [
        Job("stages", ".".join(setting), stages.check_one, (*setting, torch.device(device)), urgent)
        for setting in stages.settings()
        for urgent in (1 if setting[0] in stages.FIRST else 3,)
    ]


def of_graphs(device: str) -> list[Job]:
    """Steps captured in CUDA graphs and replayed."""
    return [
        Job("graphs", graphs.name_of(*setting), graphs.check_one, (*setting, torch.device(device)), 1)
        for setting in graphs.settings()
    ]


def of_moves(device: str) -> list[Job]:
    """States that change places between the device and the host."""
    return [Job("moves", name, moves.check_one, (name, torch.device(device)), 1) for name in moves.CHECKS]


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Those first without which the rest says little: a run that is cut short has then seen something of everything."""
    return sorted(jobs, key=lambda job: job.urgent)
