"""Work for several processes, each with a CUDA context of its own, of which any may be lost at any moment.

A kernel that reads or writes where it must not takes its process' context with it: every later call there fails.  Such
a process ends, and another takes its place; what else was running goes on.  `concurrent.futures` gives up all that is
running when one process ends, and keeps one that answers but can do nothing any more.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from gpu.machine import in_words

Work = Callable[[Any], tuple[Any, bool]]
"""Does a job, in another process: (what came of it, whether the process may go on)."""

TRIES = 2
"""How often a job is given to a process that ends over it."""


@dataclass(frozen=True)
class Lost:
    """What there is instead of a result, in words."""

    why: str


_ENDED = Lost("the process that ran it ended")

_BEGUN = None
"""A process's first message about a job: it has taken it."""


@dataclass
class _Worker:
    """A process, and the job that it is at, as its number, since when: inf until it has begun with it."""

    process: Any
    pipe: Any
    job: int | None = None
    since: float = math.inf

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def each(work: Work, jobs: Sequence[Any], processes: int, end: float, longest: float) -> Iterator[tuple[Any, Any]]:
    """(job, what came of it or why nothing did) as they come; those that `end` leaves no time for are missing.

    end      of time.monotonic(); processes that are still busy then are ended
    longest  seconds that a job may take, from when its process takes it: to start one on a busy machine may take longer
    """
    waiting, tries = deque(range(len(jobs))), [0] * len(jobs)
    processes = min(processes, len(jobs))
    workers: list[_Worker] = []
    try:
        while waiting or any(w.job is not None for w in workers):
            while waiting and len(workers) < processes:
                workers.append(_start(work))
            for worker in workers:
                if waiting and worker.job is None:
                    _give(worker, waiting.popleft(), jobs, tries)
            now = time.monotonic()
            if now >= end:
                return
            busy = [w for w in workers if w.job is not None]
            until = min(end, *(w.since + longest for w in busy))
            ready = connection.wait([w.pipe for w in busy], max(until - now, 0.0))
            for worker in busy:
                number = worker.job
                assert number is not None
                late = time.monotonic() - worker.since > longest
                if worker.pipe not in ready and not late:
                    continue
                if worker.pipe in ready:
                    answer = _answer(worker)
                    if answer is _BEGUN:
                        worker.since = time.monotonic()
                        continue
                    result, goes_on = answer
                else:
                    result, goes_on = Lost(f"not done after {longest:.0f} s"), False
                worker.job = None
                if not goes_on:
                    worker.end()
                    workers.remove(worker)
                if result is _ENDED and tries[number] < TRIES:
                    waiting.append(number)
                else:
                    yield jobs[number], result
    finally:
        for worker in workers:  # all at once: one that waits for its device may take a while
            worker.process.kill()
        for worker in workers:
            worker.end()


def _start(work: Work) -> _Worker:
    context = multiprocessing.get_context("spawn")  # a process that was forked cannot use CUDA
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker, number: int, jobs: Sequence[Any], tries: list[int]) -> None:
    worker.job, worker.since = number, math.inf
    tries[number] += 1
    with suppress(OSError):  # it has ended: found out where its answer is waited for
        worker.pipe.send(jobs[number])


def _answer(worker: _Worker) -> tuple[Any, bool] | None:
    """(result, whether the process goes on), or _BEGUN."""
    try:
        found: tuple[Any, bool] | None = worker.pipe.recv()
    except (EOFError, OSError):
        return _ENDED, False
    return found


def _serve(pipe: Any, work: Work) -> None:
    """A process that does one job after the other."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_BEGUN)
        try:
            result, goes_on = work(job)
        except Exception as error:  # said in the place of a result
            result, goes_on = Lost(in_words(error)), False
        pipe.send((result, goes_on))
        if not goes_on:
            return
