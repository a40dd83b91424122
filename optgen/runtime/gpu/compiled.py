"""Find the Triton kernels of a pair; start one kernel, and compile and load it before."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.records.join import Pair
from optgen.runtime.work.counting import Control, HostScalars


@functools.cache
def launched(record: Any, **how: Any) -> Any:
    """Return the record of a kernel, a Sweep or a Level, with how it is launched; the same for the same arguments."""
    return replace(record, **how)


@functools.cache
def kernels(pair: Pair) -> Any:
    """Return the Triton kernels of a pair."""
    from optgen.runtime.gpu import join

    return join.kernels(pair, *map(importlib.import_module, pair.triton))


@functools.cache
def has_kernels(pair: Pair) -> bool:
    """Return True if Triton kernels were generated."""
    try:
        return bool(pair.triton) and all(module and importlib.util.find_spec(module) for module in pair.triton)
    except ModuleNotFoundError:  # no package of that name
        return False


@dataclass(frozen=True, slots=True)
class Call:
    """One launch of a kernel (table, work, scalars..., step key, constants...).

    table, work  its table of addresses, and its work items
    scalars      the scalars that it takes, by position
    keyed        it takes the key of the step
    constants    what is known when it is compiled
    options      of the compiler
    """

    kernel: Any
    table: Tensor
    work: Tensor
    scalars: Sequence[int]
    keyed: bool
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


def start(call: Call, scalars: HostScalars | Control) -> None:
    """Launch a kernel; in a `Control` the scalars and the key of a step are on the device."""
    outer, given, told = _outer(call, scalars)
    options = _roomier.get(_key(call, scalars), call.options) if _roomier else call.options
    outer[(call.work.shape[0],)](*given, **told, **options)


def load(call: Call, scalars: HostScalars | Control) -> None:
    """Compile the kernel that `start` launches with the same arguments for the current device, and put it there, unless
    that was done before.

    Where it spills within the registers that its plan leaves it ("maxnreg"), or that the compiler takes for it, it is
    compiled with more of them.
    """
    key = _key(call, scalars)
    if key in _loaded:
        return
    outer, given, told = _outer(call, scalars)

    def spills(options: Mapping[str, Any]) -> int:
        made = outer.warmup(*given, grid=(call.work.shape[0],), **told, **options)
        getattr(made, "run", None)  # a compiled kernel is put onto the device when its launcher is first asked for
        if not getattr(made, "n_spills", 0) or torch.version.hip is not None:  # AMD's compiler is told no limits
            return 0
        return int(made.n_regs)

    fitting = without_spills(call.options, spills, call.options.get("num_warps", 4))
    if fitting != call.options:
        _roomier[key] = fitting
    _loaded[key] = (outer, call.kernel)


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


def _key(call: Call, scalars: HostScalars | Control) -> tuple[object, ...]:
    """Return a key of all that decides what is compiled, and for which device."""
    key = (id(call.kernel), call.table.device, *call.constants.items(), *call.options.items())
    return (*key, *call.scalars, call.keyed, scalars.lines > 1) if isinstance(scalars, Control) else key


def _outer(
    call: Call, scalars: HostScalars | Control
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return (kernel, arguments, constants) of a launch; if its scalars are on the device, of the kernel around it."""
    if not (isinstance(scalars, Control) and (call.scalars or call.keyed)):
        given: tuple[Any, ...] = ()
        if not isinstance(scalars, Control):
            given = (*(scalars.values[k] for k in call.scalars), *scalars.keys[: call.keyed])
        return call.kernel, (call.table, call.work, *given), call.constants
    from optgen.runtime.gpu import device_steps

    around = {"kernel": call.kernel, "WHICH": tuple(call.scalars), "KEYED": call.keyed}
    around |= {"LINE": _place_of_line(call, scalars), "CONSTANTS": _ordered(call.kernel, call.constants)}
    return device_steps.controlled, (call.table, call.work, scalars.values, scalars.words), around


def _place_of_line(call: Call, scalars: Control) -> tuple[int, ...]:
    """Return where a program finds the number of its line (`device_steps.controlled`); () where there is one line."""
    if scalars.lines == 1:
        return ()
    (record,) = call.constants.values()
    entry = record.numel + 2 if call.keyed else record.rounds[0].matrices + 5  # sizes of matrices and of the tensor
    return call.work.shape[1], record.width, entry, scalars.values.shape[1]


def _ordered(kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the kernel's last arguments as `controlled` takes them."""
    import triton
    import triton.language as tl

    taken = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
    assert set(taken) == set(constants), (kernel.arg_names, constants)
    # The interpreter hands a constant on as it is: a record that is one has no fields of its own.
    plain = not isinstance(kernel, triton.JITFunction)
    found = (constants[name] for name in taken)
    return tuple(value if plain and hasattr(value, "cache_key") else tl.constexpr(value) for value in found)
