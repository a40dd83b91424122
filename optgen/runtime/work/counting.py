"""Steps that are counted on a device: nothing in them is read by the host, so a CUDA graph may hold them.

The number of the step, the host states and the hyper-parameters given as tensors are 0-dim tensors there, or tensors of
one entry for each line of a bucket where these differ.  The generated host functions make such tensors of them,
`Control` lays those out in memory, and a kernel around each kernel (gpu/device_steps.py) hands them on.

One tensor counts the steps of all parameters of a line: their states hold the same object.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.options.options import Numbers
from optgen.runtime.records import Variant, keys
from optgen.runtime.records.scalars import Scalar, column
from optgen.runtime.states import state


def capturing() -> bool:
    """Return True while a CUDA graph is being captured on the current stream."""
    return torch.cuda._initialized and torch.cuda.is_current_stream_capturing()


def not_ready(what: str) -> RuntimeError:
    """The error of a capture that would hold what must not be repeated."""
    return RuntimeError(
        f"a CUDA graph is being captured, but {what} is not ready for it: create the optimizer with capturable=True "
        f"(its kernels are Triton's) and make a step with the same parameters before the capture"
    )


@dataclass(slots=True)
class Lines:
    """The parameters of a bucket that share all scalars, those of one group that have made as many steps, are a line.
    Parallel lists:

    groups  the number of each line's group: [0, 1]
    firsts  the position of its first parameter over all groups: [0, 3]
    steps   the count of steps before this one: [7, 7]; tensors where a device counts, which begins with numbers
    hosts   the host states likewise: [(0.9,), (0.9,)]
    """

    groups: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    hosts: list[tuple[Any, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: int, first: int, step: Any, host: tuple[Any, ...]) -> None:
        self.groups.append(group)
        self.firsts.append(first)
        self.steps.append(step)
        self.hosts.append(host)


class HostScalars(NamedTuple):
    """The scalars of a bucket's step.

    values  fp32, those of one line after the other
    keys    int32: of each line the step key, a hash of seed and step
    counts  of each line, the number of the step and the seed
    """

    values: array[float]
    keys: array[int]
    counts: Sequence[tuple[int, int]]

    def of(self, line: int) -> array[float]:
        """Return the scalars of a line."""
        width = len(self.values) // len(self.keys)
        return self.values[line * width : (line + 1) * width]

    def rounded(self, line: int, position: int) -> float:
        """Return a scalar of a line, for what torch computes between kernels."""
        return self.of(line)[position]


class StepScalars(NamedTuple):
    """A bucket's step, its scalars computed.

    scalars  the numbers that kernels take
    after    of each line, the count of steps and the host states after the step: (8, 0.81); or the step on the device
    """

    scalars: HostScalars | Control
    after: Sequence[tuple[Any, ...]] | DeviceStep


def is_there(x: object, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True for a number on the device: the count of steps, int64, or a host state, fp64."""
    return isinstance(x, Tensor) and x.dtype is dtype and x.ndim == 0 and x.device == device


def sharing(states: Mapping[Any, Any]) -> Counter[int]:
    """Return of each tensor that counts steps, by its id, the number of parameters that it counts."""
    counts = (entry.get("step") for entry in state.of_parameters(states))
    return Counter(id(x) for x in counts if isinstance(x, Tensor))


class Control:
    """The scalars of a bucket's step on its device.

    lines    of scalars
    values   fp32 (lines, scalars): as the kernels take them
    words    int64 (lines, 2): the number of the step, and what the seed makes of step keys
    numbers  what `values` were made of: floats, and fp64 tensors, 0-dim or of one entry for each line
    """

    def __init__(self, count: int, device: torch.device, lines: int = 1) -> None:
        self.device, self.lines = device, lines
        self.values = torch.zeros(lines, count, dtype=torch.float32, device=device)
        self.words = torch.zeros(lines, 2, dtype=torch.int64, device=device)
        self.numbers: Sequence[Scalar] = [0.0] * count
        values, words = (x if lines > 1 else x[0] for x in (self.values, self.words))
        self._places = [*values.unbind(-1)]
        self._number, self._stream = words.unbind(-1)
        self._counted = torch.zeros_like(self._number, dtype=torch.float64)
        self._there: list[float | None] = [None] * count
        self._seeds: Sequence[int] = ()
        self._graphs = False

    def count(self, done: Sequence[Tensor]) -> Tensor:
        """The numbers of the next steps of lines, after so many: fp64, to be read before the next are counted."""
        torch.add(torch.stack(list(done)) if len(done) > 1 else done[0], 1, out=self._number)
        return self._counted.copy_(self._number)

    def fill(self, numbers: Sequence[Scalar], seeds: Sequence[int]) -> None:
        """Write the values of the steps whose numbers were counted last; no tensor is read on the host.

        seeds  of the random bits of each line; (): none are drawn
        Numbers that stand there already are not written again.  A graph writes all; and since nobody says when it runs,
        all is written after it, too.
        """
        self.numbers = numbers
        self._graphs = self._graphs or capturing()
        for i, x in enumerate(numbers):
            if isinstance(x, Tensor):
                self._places[i].copy_(x)
                self._there[i] = None
            elif self._graphs or x != self._there[i] or x == 0:  # zeros have signs
                self._places[i].fill_(ctypes.c_float(x).value)  # an infinity, where `fill_` would refuse it
                self._there[i] = x
        if seeds and (self._graphs or seeds != self._seeds):
            if len({*seeds}) == 1:
                self._stream.fill_(keys.stream_of_steps(seeds[0]))
            else:
                for place, seed in zip(self._stream.unbind(), seeds, strict=True):
                    place.fill_(keys.stream_of_steps(seed))
            self._seeds = seeds

    def send(self, scalars: HostScalars) -> None:
        """Write scalars that the host computed; it does not wait for the device (see `workspace.TAKEN_OVER`)."""
        words = [(number, keys.stream_of_steps(seed)) for number, seed in scalars.counts]
        self.words.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"), non_blocking=True)
        values = torch.tensor(scalars.values.tolist(), dtype=torch.float32, device="cpu")
        self.values.copy_(values.view_as(self.values), non_blocking=True)

    def tensors(self) -> list[Tensor]:
        """All that a graph reads of it."""
        return [self.values, self.words, self._counted]

    def rounded(self, line: int, position: int) -> float:
        """A scalar in fp32, for what torch computes between kernels; RuntimeError where only the device knows it."""
        value = self.numbers[position]
        if isinstance(value, Tensor):
            raise RuntimeError(
                "a matrix function takes a hyper-parameter that is a tensor, or a number that depends on the step, "
                "which a step that is counted on the device does not read: give it as a number, or do not set "
                "capturable=True"
            )
        return ctypes.c_float(value).value


class DeviceStep:
    """One step of a bucket, counted on the device.

    lines  with the steps done before it, int64, and the host states before it, fp64
    made   the host states after it
    """

    def __init__(self, lines: Lines, made: Sequence[Scalar]) -> None:
        self.lines, self.made = lines, made

    def finish(self) -> None:
        """Count the step, and keep the host states."""
        torch._foreach_add_(self.lines.steps, 1)
        for kept, value in zip(zip(*self.lines.hosts, strict=True), self.made, strict=True):
            if isinstance(value, Tensor):
                torch._foreach_copy_(list(kept), list(value.expand(len(kept)).unbind()))
            else:
                for x in kept:
                    x.fill_(value)


def on_host(variant: Variant, lines: Lines, numbers: Numbers) -> StepScalars:
    """Compute the scalars of the next step in fp64, of all lines at once.

    numbers  of the group of each line
    """
    width, count = variant.host[1], len(numbers.seeds)
    if count == 1:
        number, seed = lines.steps[0] + 1, numbers.seeds[0]
        found = dict(zip(variant.host_names, lines.hosts[0], strict=True))
        found |= zip(numbers.hypers, map(itemgetter(0), numbers.hypers.values()), strict=True)
        one = variant.host[0](number, numbers.signs[0], **found)
        key = array("i", (keys.step_key(seed, number),))
        return StepScalars(HostScalars(array("f", one[:width]), key, [(number, seed)]), [(number, *one[width:])])
    numbers_of_steps = [step + 1 for step in lines.steps]
    made = _of_lines(variant, column(numbers_of_steps, HERE), lines, numbers, HERE)
    scalars = _rows(made[:width], count)
    hosts = (x.tolist() if isinstance(x, Tensor) else repeat(x, count) for x in made[width:])
    after = list(zip(numbers_of_steps, *hosts, strict=True))
    counts = list(zip(numbers_of_steps, numbers.seeds, strict=True))
    known = {(number, seed): keys.step_key(seed, number) for number, seed in {*counts}}
    return StepScalars(HostScalars(scalars, array("i", map(known.__getitem__, counts)), counts), after)


def _rows(made: Sequence[Any], count: int) -> array[float]:
    """Return the scalars of lines, fp32, those of one line after the other."""
    if Tensor not in map(type, made):
        return array("f", made) * count
    rows = torch.empty(count, len(made), dtype=torch.float64, device="cpu")
    for place, value in zip(rows.unbind(1), made, strict=True):
        if isinstance(value, Tensor):
            place.copy_(value)
        else:
            place.fill_(value)
    rows = rows.float()
    return array("f", ctypes.string_at(rows.data_ptr(), rows.nbytes))


HERE = torch.empty(0, device="cpu")
"""A tensor beside those of lines whose scalars the host computes."""


def _of_lines(variant: Variant, number: Scalar, lines: Lines, numbers: Numbers, beside: Tensor) -> Sequence[Any]:
    """Return the scalars of lines and their host states after the step: each one number, or a tensor of all lines."""
    columns = numbers.hypers | dict(zip(variant.host_names, zip(*lines.hosts, strict=True), strict=True))
    found = {name: column(values, beside) for name, values in columns.items()}
    return variant.host[0](number, column(numbers.signs, beside), **found)


def on_device(variant: Variant, control: Control, lines: Lines, numbers: Numbers) -> StepScalars:
    """Compute the scalars of the next step into `control`; arguments as in `on_host`."""
    number, width = control.count(lines.steps), variant.host[1]
    values = _of_lines(variant, number, lines, numbers, number)
    control.fill(values[:width], numbers.seeds if variant.stochastic else ())
    if variant.eager.random:
        raise RuntimeError(
            f"{', '.join(sorted(variant.eager.random))}: matrix states are rounded by random numbers of the step, "
            "which a step that is counted on the device does not read: keep them in fp32 (overrides= of a plan), or do "
            "not set capturable=True"
        )
    for k in (k for stage in variant.stages if stage.on_host for k in stage.scalars):
        control.rounded(0, k)  # raises where a function of matrices needs what only the device knows
    return StepScalars(control, DeviceStep(lines, values[width:]))
