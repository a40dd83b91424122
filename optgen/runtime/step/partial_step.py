"""The error of a step whose kernels failed after others of it had run."""

from __future__ import annotations

from collections.abc import Sequence

from optgen.runtime.options import entries
from optgen.runtime.options.entries import Owner
from optgen.runtime.records.misfits import SHOWN
from optgen.runtime.states.state import State
from optgen.runtime.work import counting


class StepError(Exception):
    """An error of a kernel, with the states that were stepped before it and those of the kernel itself."""

    def __init__(self, error: BaseException, done: Sequence[State], at_work: Sequence[State]) -> None:
        super().__init__()
        self.error, self.done, self.at_work = error, done, at_work

    def noted(self, owner: Owner) -> BaseException:
        """Return the error with a note of what the step has done."""
        if not counting.capturing():  # else nothing has run
            self.error.add_note(f"{owner.cls.__name__}.step() broke off: {self._described(owner)}")
        return self.error

    def _described(self, owner: Owner) -> str:
        """Return which parameters have made the step, which have not, and whose memory may hold a part of it."""
        finished, begun = {id(s) for s in self.done}, {id(s) for s in self.at_work}
        made: list[str] = []
        left: list[str] = []
        unsure: list[str] = []
        for entry in entries.of(owner.groups):
            own = id(owner.states.get(entry.p))
            if own in finished:
                made.append(repr(entry.name))
            elif entry.p.grad is not None or own in begun:
                left.append(repr(entry.name))
                if own in begun:
                    unsure.append(repr(entry.name))
        said = f"{_counted(made)} made the step, {_counted(left)} not"
        if unsure:
            said += f"; {_listed(unsure)} may hold a part of it"
        return f"{said}. Another step() would step all of them: go on from a checkpoint"


def _counted(names: Sequence[str]) -> str:
    count = "1 parameter has" if len(names) == 1 else f"{len(names)} parameters have"
    return f"{count} ({_listed(names)})" if names else count


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
