"""What a step had done when an error broke it off, so that making it again does the rest and no more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from optgen.runtime.layout import sharding
from optgen.runtime.records.misfits import SHOWN
from optgen.runtime.states import state


class Named(Protocol):
    """A parameter of the optimizer, and its name or position."""

    @property
    def p(self) -> Tensor: ...

    @property
    def name(self) -> str | int: ...


class BrokenOff:
    """Of a step that an error broke off after its kernels had begun.

    entries  all parameters of the optimizer
    states   the optimizer's, by parameter
    done     those whose parameters have made the step
    at_work  those whose parameters were being stepped: their memory may hold a part of it
    before   the same of the attempt before, where this one was to do the rest of it

    A gradient that is the same object at the same version, of the same sum of bits, is the one that was stepped with:
    nothing is kept alive for that.  (Graphs, collectives and `.data` write without moving versions.)  Of a DTensor that
    is its part on this rank; where ranks send one another something in its step, they agree on what was made (sharding.
    agreed).  A parameter may have made the step without a gradient here, with one of other ranks.
    """

    def __init__(
        self,
        entries: Iterable[Named],
        states: Mapping[Any, state.State],
        done: Sequence[state.State],
        at_work: Sequence[state.State],
        before: BrokenOff | None = None,
    ) -> None:
        self.done, self.at_work = list(done), list(at_work)
        finished, begun = {id(s) for s in done}, {id(s) for s in at_work}
        self._made: dict[Tensor, tuple[weakref.ref[Tensor], int, int | None]] = {}
        self._without: set[Tensor] = set()
        names: list[str] = []
        left: list[str] = []
        unsure: list[str] = []
        self._again = 0
        for entry in entries:
            p, g = entry.p, entry.p.grad
            own = id(states.get(p))
            if own in finished or (before is not None and before.made(p, g)):
                names.append(repr(entry.name))
                if g is None:
                    self._without.add(p)
                elif (here := sharding.local(g)).is_inference():  # has no version
                    self._again += 1
                else:
                    self._made[p] = (weakref.ref(g), here._version, _bits(here))
                continue
            if g is None:
                continue
            left.append(repr(entry.name))
            if own in begun:
                unsure.append(repr(entry.name))
        self._names, self._left, self._unsure = names, left, unsure

    def made(self, p: Tensor, g: Tensor | None) -> bool:
        """Whether p has made the step with this very gradient; None: with those of other ranks."""
        if g is None:
            return p in self._without
        found = self._made.get(p)
        if found is None or found[0]() is not g:
            return False
        here = sharding.local(g)
        return here._version == found[1] and (found[2] is None or _bits(here) in (found[2], None))

    def __str__(self) -> str:
        said = f"{_counted(self._names)} made the step, {_counted(self._left)} not"
        if self._unsure:
            said += f"; {_listed(self._unsure)} may hold a part of it"
        if self._made:
            said += ". step() with the same gradients makes the rest of it"
        if self._again:
            said += f". {self._again} of those that made it would make it again: go on from a checkpoint"
        return said


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(g: Tensor) -> int | None:
    """The sum of its elements' bits; None where it cannot be had: the error that broke the step off may be the
    device's."""
    try:
        return int(g.detach().view(_INTEGERS[g.element_size()]).sum(dtype=torch.int64))
    except RuntimeError:
        return None


def _counted(names: Sequence[str]) -> str:
    what = "1 parameter has" if len(names) == 1 else f"{len(names)} parameters have"
    return f"{what} ({_listed(names)})" if names else what


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
