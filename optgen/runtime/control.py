"""Steps that are counted on a device: nothing in them is read by the host, so a CUDA graph may hold them.

The number of the step, the host states and the hyper-parameters given as tensors are 0-dim tensors there.  The printed
host functions make 0-dim tensors of them, `Control` lays those out in memory, and a kernel around each kernel
(triton_control.py) hands them on.  It also leaves everything as it is where a GradScaler has found an infinity.

One tensor counts the steps of all parameters that step together: their states hold the same object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime import keys, state
from optgen.runtime.records import HostFunction, Variant
from optgen.runtime.scalars import Scalar

if TYPE_CHECKING:
    from optgen.runtime.bucket import Bucket


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda._initialized and torch.cuda.is_current_stream_capturing()


def not_ready(what: str) -> RuntimeError:
    """The error of a capture that would hold what must not be repeated."""
    return RuntimeError(
        f"a CUDA graph is being captured, but {what} is not ready for it: create the optimizer with capturable=True "
        f"(its kernels are Triton's) and make a step with the same parameters before the capture"
    )


class Scaler(NamedTuple):
    """What a GradScaler has left with the optimizer: scale of the gradients, and whether one is infinite; fp32, of one
    element each."""

    scale: Tensor | None
    found: Tensor | None

    @classmethod
    def of(cls, optimizer: object) -> Scaler | None:
        made = cls(getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
        return None if made == (None, None) else made

    def found_infinity(self) -> bool:
        """Reads it: waits for the device that it is on."""
        return self.found is not None and bool(self.found.item() != 0)

    def factor(self, sign: float) -> float:
        """What gradients are multiplied with; reads the scale."""
        return sign if self.scale is None else sign / float(self.scale.item())


@dataclass(slots=True)
class Counter:
    """A tensor that counts steps on a device, or holds a host state, and how many parameters share it."""

    tensor: Tensor
    shared: int


class Counters:
    """The tensors that count steps, or hold host states.

    What stands in a state and is none of these was put there by somebody else, and is read by the host.
    """

    def __init__(self) -> None:
        self._known: dict[int, Counter] = {}

    def of(self, x: object) -> Counter | None:
        found = self._known.get(id(x))
        return found if found is not None and found.tensor is x else None

    def knows(self, x: object) -> bool:
        return self.of(x) is not None

    def shared_by(self, x: object) -> int:
        found = self.of(x)
        return 0 if found is None else found.shared

    def take(self, buckets: Iterable[Bucket]) -> None:
        """Note the counters of the buckets of a step."""
        for bucket in buckets:
            left = self.of(bucket.left)
            if left is not None:
                left.shared -= len(bucket.params)
        for bucket in buckets:
            for x in (bucket.step, *bucket.host):
                if isinstance(x, Tensor):
                    self._known[id(x)] = Counter(x, len(bucket.params))

    def forget(self, states: Mapping[Any, Any]) -> None:
        """Drops what no state holds any more, once there is much of it."""
        if len(self._known) > 64 and len(self._known) > 8 * len(states):
            held = {id(x) for entry in state.of_parameters(states) for x in entry.values()}
            self._known = {key: value for key, value in self._known.items() if key in held}


class Control:
    """The scalars of a bucket's step on its device.

    values   fp32: as the kernels take them
    words    int64 (3,): the number of the step, whether it is to be skipped, and what the seed makes of step keys
    numbers  what `values` were made of: floats, and 0-dim fp64 tensors
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self.values = torch.zeros(count, dtype=torch.float32, device=device)
        self.words = torch.zeros(3, dtype=torch.int64, device=device)
        self.numbers: Sequence[Scalar] = [0.0] * count
        self._places = [*self.values.unbind()]
        self._counted = torch.zeros((), dtype=torch.float64, device=device)
        self._number, self._skip, self._stream = self.words.unbind()
        self._there: list[float | None] = [None] * count
        self._seed: int | None = None
        self._skips: bool | None = None
        self._graphs = False

    def count(self, done: Tensor) -> Tensor:
        """The number of the next step, after so many: fp64, to be read before the next is counted."""
        torch.add(done, 1, out=self._number)
        return self._counted.copy_(self._number)

    def fill(self, numbers: Sequence[Scalar], seed: int | None, skip: Tensor | None) -> None:
        """For the step whose number was counted last; no tensor is looked at.

        seed  of the random bits, None: none are drawn; skip: bool, None: no
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
        if skip is not None:
            self._skip.copy_(skip)
            self._skips = None
        elif self._graphs or self._skips is not False:
            self._skip.zero_()
            self._skips = False

    def tensors(self) -> list[Tensor]:
        """All that a graph reads of it."""
        return [self.values, self.words, self._counted]

    def rounded(self, position: int) -> float:
        """A scalar in fp32, for what torch computes between kernels; RuntimeError where only the device knows it."""
        value = self.numbers[position]
        if isinstance(value, Tensor):
            raise RuntimeError(
                "a hyper-parameter of a matrix function is a tensor, which a step that is counted on the device does "
                "not read: give it as a number"
            )
        return ctypes.c_float(value).value


class Step:
    """One step of a bucket, counted on the device.

    count  int64: steps done, before it
    host   fp64: the host states, before it
    found  of a GradScaler: whether there was an infinity; None: there is no scaler
    """

    def __init__(self, count: Tensor, host: Sequence[Tensor], found: Tensor | None) -> None:
        self.count, self.host = count, host
        self.skip = None if found is None else found.reshape(()).to(count.device, non_blocking=True) != 0
        self.made: Sequence[Scalar] = ()

    def fill(
        self,
        control: Control,
        function: HostFunction,
        scalars: int,
        sign: float,
        scale: Tensor | None,
        hypers: Mapping[str, Any],
        names: Sequence[str],
        seed: int | None,
    ) -> None:
        """Computes the scalars in fp64.

        function, scalars  the host function, and how many of its results are kernel scalars
        sign, scale        what gradients are multiplied with, and divided by
        names              of the host states
        seed               None where no random bits are drawn
        """
        number = control.count(self.count)
        factor: Scalar = sign
        if scale is not None:
            factor = sign / scale.reshape(()).to(self.count.device, torch.float64, non_blocking=True)
        values = function(number, factor, **hypers, **dict(zip(names, self.host, strict=True)))
        self.made = values[scalars:]
        control.fill(values[:scalars], seed, self.skip)

    def finish(self) -> None:
        """Counts the step, and keeps the host states, unless it was skipped."""
        if self.skip is None:
            self.count.add_(1)
        else:
            self.count.add_(~self.skip)
        for kept, value in zip(self.host, self.made, strict=True):
            new = value if isinstance(value, Tensor) else torch.full_like(kept, value)
            kept.copy_(new if self.skip is None else torch.where(self.skip, kept, new))


def check_calls(variant: Variant, control: Control) -> None:
    """RuntimeError where a function of matrices between the kernels needs a number that only the device knows."""
    names = variant.scalars if variant.kernel_scalars is None else variant.kernel_scalars
    for stage in variant.stages:
        for x in stage.given:
            if isinstance(x, str):
                control.rounded(names.index(x))


def start(
    kernel: Any,
    programs: int,
    tables: tuple[Tensor, Tensor],
    scalars: Sequence[float] | Control,
    which: Sequence[int],
    step_key: int | None,
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """One launch of a kernel (table, work, scalars..., step key, constants...).

    tables    its table, and its work items
    which     the scalars that it takes, by position
    step_key  None where it takes none; in a `Control` its value counts
    """
    outer, given, told = _call(kernel, tables, scalars, which, step_key, constants)
    if _roomier:
        options = _roomier.get(_key(kernel, given, scalars, which, step_key, constants, options), options)
    outer[(programs,)](*given, **told, **options)


def load(
    kernel: Any,
    programs: int,
    tables: tuple[Tensor, Tensor],
    scalars: Sequence[float] | Control,
    which: Sequence[int],
    step_key: int | None,
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """What comes before the first launch that `start` makes with the same arguments: the kernel is compiled for the
    current device and put there, unless that was done before.

    Where it spills within the registers that its plan leaves it ("maxnreg"), or that the compiler takes for it, it is
    compiled with more of them.
    """
    outer, given, told = _call(kernel, tables, scalars, which, step_key, constants)
    key = _key(kernel, given, scalars, which, step_key, constants, options)
    if key in _loaded:
        return

    def spills(options: Mapping[str, Any]) -> int:
        made = outer.warmup(*given, grid=(programs,), **told, **options)
        getattr(made, "run", None)  # a compiled kernel is put onto the device when its launcher is first asked for
        if not getattr(made, "n_spills", 0) or torch.version.hip is not None:  # AMD's compiler is told no limits
            return 0
        return int(made.n_regs)

    fitting = without_spills(options, spills, options.get("num_warps", 4))
    if fitting != options:
        _roomier[key] = fitting
    _loaded[key] = (outer, kernel)


def without_spills(
    options: Mapping[str, Any], spills: Callable[[Mapping[str, Any]], int], warps: int
) -> dict[str, Any]:
    """`options` with the least "maxnreg" at which a kernel does not spill, in steps of 8 registers below 128, where
    they decide how many programs a processor holds, and of 16 from there on; without one where it spills at all that
    a program of so many warps can have.

    spills  compiles it that way, and says how many registers it takes where it spills, else 0

    A compiler that is told no limit aims at a number of programs for each processor, and spills for one more: told
    a step more than it took, it has room.  Steps are no longer: LAMB's first sweep under bnb8 fits in 208 and 216
    registers on sm_90, and spills 8 bytes at 200 and from 224 on (Triton 3.9).
    """
    most = registers(warps)
    free = {name: value for name, value in options.items() if name != "maxnreg"}
    found = dict(options)
    while taken := spills(found):
        told = found.get("maxnreg")
        step = 8 if (told or taken) < 128 else 16
        limit = (told or taken // step * step) + step
        if limit > most:
            if found != free:
                spills(free)
            return free
        found["maxnreg"] = limit
    return found


def registers(warps: int) -> int:
    """The most registers of a thread that a program of so many warps can start with, on every device of NVIDIA's."""
    return min(255, 65536 // (32 * warps))


_loaded: dict[tuple[object, ...], Any] = {}
"""Kernels that were loaded, kept so that their addresses stay theirs."""

_roomier: dict[tuple[object, ...], dict[str, Any]] = {}
"""The options of those that need more registers than they were planned with, or are given."""


def _key(
    kernel: Any,
    given: Sequence[Any],
    scalars: Sequence[float] | Control,
    which: Sequence[int],
    step_key: int | None,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[object, ...]:
    """Of all that decides what is compiled, and for which device."""
    key = (id(kernel), given[0].device, *constants.items(), *options.items())
    return (*key, *which, step_key is None) if isinstance(scalars, Control) else key


def _call(
    kernel: Any,
    tables: tuple[Tensor, Tensor],
    scalars: Sequence[float] | Control,
    which: Sequence[int],
    step_key: int | None,
    constants: Mapping[str, Any],
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """(kernel, arguments, constants) of a launch: where its scalars stand on the device, of the kernel around it."""
    if not isinstance(scalars, Control):
        keyed = () if step_key is None else (step_key,)
        return kernel, (*tables, *(scalars[k] for k in which), *keyed), constants
    from optgen.runtime import triton_control

    around = {
        "kernel": kernel,
        "WHICH": tuple(which),
        "KEYED": step_key is not None,
        "CONSTANTS": _ordered(kernel, constants),
    }
    return triton_control.controlled, (*tables, scalars.values, scalars.words), around


def _ordered(kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the kernel's last arguments as `controlled` takes them; defaults too, of which Triton 3.6
    makes constants only if they are numbers."""
    import triton
    import triton.language as tl

    names, defaults = kernel.arg_names, kernel.fn.__defaults__ or ()
    given = {**dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)), **constants}
    taken = names[len(names) - len(given) :]
    assert set(taken) == set(given), (names, constants)
    # The interpreter hands a constant on as it is: a record that is one has no fields of its own.
    plain = not isinstance(kernel, triton.JITFunction)
    found = (given[name] for name in taken)
    return tuple(value if plain and hasattr(value, "cache_key") else tl.constexpr(value) for value in found)
