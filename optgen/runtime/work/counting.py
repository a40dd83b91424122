"""Steps that are counted on a device: nothing in them is read by the host, so a CUDA graph may hold them.

The number of the step, the host states and the hyper-parameters given as tensors are 0-dim tensors there.  The
generated host functions make 0-dim tensors of them, `Control` lays those out in memory, and a kernel around each kernel
(gpu/device_steps.py) hands them on.

One tensor counts the steps of all parameters that step together: their states hold the same object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.records import Variant, keys
from optgen.runtime.records.scalars import Scalar
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


Scalars = Any
"""The scalars of a bucket's step: a row of fp32 numbers (`table`), or the Control in which they are on the device."""


class StepScalars(NamedTuple):
    """A bucket's step, its scalars computed.

    scalars  the numbers that kernels take
    key      the step key, a hash of seed and step; 0 where a device makes it
    after    the count of steps and the host states after the step: [8, 0.81]; or the step on the device
    """

    scalars: Scalars
    key: int
    after: list[Any] | DeviceStep


def is_there(x: object, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True for a number on the device: the count of steps, int64, or a host state, fp64."""
    return isinstance(x, Tensor) and x.dtype is dtype and x.ndim == 0 and x.device == device


def sharing(states: Mapping[Any, Any], count: object) -> int:
    """Return the number of parameters whose steps this very tensor counts."""
    if not isinstance(count, Tensor):
        return 0
    return sum(entry.get("step") is count for entry in state.of_parameters(states))


class Control:
    """The scalars of a bucket's step on its device.

    values   fp32: as the kernels take them
    words    int64 (2,): the number of the step, and what the seed makes of step keys
    numbers  what `values` were made of: floats, and 0-dim fp64 tensors
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self.values = torch.zeros(count, dtype=torch.float32, device=device)
        self.words = torch.zeros(2, dtype=torch.int64, device=device)
        self.numbers: Sequence[Scalar] = [0.0] * count
        self._places = [*self.values.unbind()]
        self._counted = torch.zeros((), dtype=torch.float64, device=device)
        self._number, self._stream = self.words.unbind()
        self._there: list[float | None] = [None] * count
        self._seed: int | None = None
        self._graphs = False

    def count(self, done: Tensor) -> Tensor:
        """The number of the next step, after so many: fp64, to be read before the next is counted."""
        torch.add(done, 1, out=self._number)
        return self._counted.copy_(self._number)

    def fill(self, numbers: Sequence[Scalar], seed: int | None) -> None:
        """Write the values of the step whose number was counted last; no tensor is read on the host.

        seed  of the random bits, None: none are drawn
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
        if seed is not None and (self._graphs or seed != self._seed):
            self._stream.fill_(keys.stream_of_steps(seed))
            self._seed = seed

    def tensors(self) -> list[Tensor]:
        """All that a graph reads of it."""
        return [self.values, self.words, self._counted]

    def rounded(self, position: int) -> float:
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

    count  int64: steps done, before it
    host   fp64: the host states, before it
    made   the host states after it
    """

    def __init__(self, count: Tensor, host: Sequence[Tensor], made: Sequence[Scalar]) -> None:
        self.count, self.host, self.made = count, host, made

    def finish(self) -> None:
        """Count the step, and keep the host states."""
        self.count.add_(1)
        for kept, value in zip(self.host, self.made, strict=True):
            kept.copy_(value) if isinstance(value, Tensor) else kept.fill_(value)


Row = ctypes.Array[ctypes.c_float]


def table(widths: Sequence[int]) -> list[Row]:
    """Return the rows of a new table of fp32 scalars, one after the other in memory, each of the widest width."""
    width = max(widths, default=0)
    return list(((ctypes.c_float * width) * len(widths))())


def on_host(
    variant: Variant, row: Row, done: Any, host: Sequence[Any], sign: float, hypers: Mapping[str, Any], seed: int
) -> StepScalars:  # fmt: skip
    """Compute the scalars of the step after `done` steps, in fp64, into a row of a table.

    host  the host states before the step
    sign  what gradients are multiplied with
    """
    (function, width), number = variant.host, done + 1
    values = function(number, sign, **hypers, **dict(zip(variant.host_names, host, strict=True)))
    row[:width] = list(values[:width])
    return StepScalars(row, keys.step_key(seed, number), [number, *values[width:]])


def on_device(
    variant: Variant, control: Control, done: Any, host: Sequence[Any], sign: float, hypers: Mapping[str, Any],
    seed: int,
) -> StepScalars:  # fmt: skip
    """Compute the scalars of the step after `done` steps into `control`; arguments as in `on_host`."""
    (function, width), number = variant.host, control.count(done)
    values = function(number, sign, **hypers, **dict(zip(variant.host_names, host, strict=True)))
    control.fill(values[:width], seed if variant.stochastic else None)
    if variant.eager.random:
        raise RuntimeError(
            f"{', '.join(sorted(variant.eager.random))}: matrix states are rounded by random numbers of the step, "
            "which a step that is counted on the device does not read: keep them in fp32 (overrides= of a plan), or do "
            "not set capturable=True"
        )
    for k in (k for stage in variant.stages if stage.space == "call" for k in stage.scalars):
        control.rounded(k)  # raises where a function of matrices needs what only the device knows
    return StepScalars(control, 0, DeviceStep(done, host, values[width:]))
