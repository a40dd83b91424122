"""The short way through a step that is like the one before.

A step over many small tensors costs more in Python than in its kernels: for 148 tensors of 512 elements, sorting them
into buckets and reading their addresses took 600 us, their kernel 30.  So what a step found out is kept, as the numbers
that a small library (cpp/replay.cpp) compares with what is there now: the same parameters, states and fields by
address, dtype and shape, gradients of the same kind (their addresses go into the kernels' tables), the same counts of
steps.  Hyper-parameters are compared here, and may change.  Any other difference: the step is made the long way, and
what that finds is kept instead.

Nothing that a user may want to free is kept alive: tensors are remembered as numbers.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import is_
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from optgen.runtime import control, cpu, keys, native, options, sharding
from optgen.runtime.bucket import Bucket

SOURCE = Path(__file__).resolve().parent / "cpp" / "replay.cpp"

tunings = 0
"""How often the settings of launches have changed."""

PATIENCE = 64
"""Most steps that go by before the next attempt, where one differs from the next again and again."""

_NUMBER, _TENSOR, _OTHER, _SHARD = range(4)

_NAMES = ("grad", "is_neg", "storage_offset", "_local_tensor", "_spec", "mesh", "placements")
"""What the library asks of tensors, and of DTensors."""


_ASKED = ("dim", "sizes", "strides", "dtype", "device_type", "device_index", "layout", "data_ptr", "storage_offset")
"""What is asked of torch's stable functions about tensors, aoti_torch_get_..."""

_DEVICES = 2**32 - 1
"""The bits of a device's number that say its kind."""


class Shim(ctypes.Structure):
    """These functions, and what the library has to know to call them; all zeros where that cannot be had."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _ASKED],
        ("at", ctypes.c_int64), ("types", ctypes.c_int64 * 2), ("dtypes", ctypes.c_int64 * 64),
        ("devices", ctypes.c_int64 * 64),
    ]  # fmt: skip

    @classmethod
    def found(cls) -> Shim:
        made = cls()
        samples = [torch.empty((2, 3), device="cpu").t(), Parameter(torch.empty((2, 3), device="cpu").t())]
        places = {_place(sample, sample._cdata) for sample in samples}
        try:
            library = ctypes.CDLL(torch._C.__file__)  # and all that it is linked with
            functions = [ctypes.cast(getattr(library, f"aoti_torch_get_{name}"), ctypes.c_void_p) for name in _ASKED]
        except (AttributeError, OSError, TypeError):
            return made
        if len(places) > 1 or 0 in places or sys.platform != "linux":
            return made
        for name, function in zip(_ASKED, functions, strict=True):
            setattr(made, name, function)
        made.types[:] = [id(type(sample)) for sample in samples]
        made.at = places.pop()
        return made

    def ask(self, name: str, tensor: Tensor) -> int:
        """A number of a tensor of these types."""
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(getattr(self, name))
        answer = ctypes.c_int32()
        return answer.value if not function(id(tensor) + self.at, ctypes.byref(answer)) else -1

    def learn(self, name: str, table: Any, tensor: Tensor, number: int) -> None:
        """Notes DLPack's number for torch's."""
        if self.at and type(tensor) in (Tensor, Parameter) and number >= 0 and 0 <= self.ask(name, tensor) < len(table):
            table[self.ask(name, tensor)] = number


class Probe:
    """The library, and torch's readers of tensors."""

    def __init__(self, library: ctypes.CDLL, reader: int) -> None:
        self.reader, self.pointer, self.shim = reader, _pointer(), Shim.found()
        self._shim = ctypes.byref(self.shim)
        self._codes: dict[torch.dtype, int] = {}
        self._dtype = library.optgen_dtype
        self._dtype.restype, self._dtype.argtypes = ctypes.c_int64, (ctypes.py_object, ctypes.c_void_p)
        self.compare = library.optgen_replay
        self.compare.restype = ctypes.c_int64
        self.compare.argtypes = (
            *[ctypes.py_object] * 4, ctypes.c_void_p, ctypes.py_object, *[ctypes.c_void_p] * 7,
        )  # fmt: skip
        strings: Any = ctypes.py_object * len(_NAMES)
        self.names = strings(*_NAMES)
        self._device = library.optgen_device
        self._device.restype, self._device.argtypes = ctypes.c_int64, (ctypes.py_object, ctypes.c_void_p)
        self.moved = (ctypes.c_int64 * 2)()
        self._moved = ctypes.byref(self.moved)
        self.slots = (ctypes.c_int64 * 3)()
        self._slots = ctypes.byref(self.slots)

    def code(self, dtype: torch.dtype) -> int:
        """DLPack's number of a dtype; -1 where it has none."""
        if dtype not in self._codes:
            sample = torch.empty(0, dtype=dtype, device="cpu")
            self._codes[dtype] = self._dtype(sample, self.reader)
            self.shim.learn("dtype", self.shim.dtypes, sample, self._codes[dtype])
        return self._codes[dtype]

    def know(self, sharded: Any) -> None:
        """Notes where DTensors have their part and their spec, seen at one of them."""
        if not self.slots[0]:
            found = [_slot(sharded, name) for name in ("_local_tensor", "_spec")]
            self.slots[:] = [id(type(sharded)) if any(found) else 0, *found]

    def device(self, tensor: Tensor) -> int:
        """DLPack's numbers of its device; -1 where it has none."""
        found: int = self._device(tensor, self.reader)
        self.shim.learn("device_type", self.shim.devices, tensor, found & _DEVICES if found >= 0 else found)
        return found


@functools.cache
def job() -> native.Job:
    """The library."""
    return native.Job("replay", SOURCE.read_text(encoding="utf-8"), vector=False, held=True)


@functools.cache
def probe() -> Probe | None:
    """None where there is no compiler, no such reader, or no lock around Python's objects."""
    reader = _reader()
    if reader is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    made = native.load([job()])[0]
    return None if isinstance(made, native.Unavailable) else Probe(made, reader)


def _reader() -> int | None:
    """Address of DLPack's dltensor_from_py_object_no_sync for torch's tensors."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        api = pointer(capsule, b"dlpack_exchange_api")
    except (ValueError, TypeError, ctypes.ArgumentError):
        return None
    # struct: version {uint32 major, minor}, previous; allocate, from, to, from without ownership, stream
    if ctypes.c_uint32.from_address(api).value != 1:
        return None
    return ctypes.c_void_p.from_address(api + 5 * ctypes.sizeof(ctypes.c_void_p)).value


def _slot(x: Any, name: str) -> int:
    """At which byte of x, and so of all instances of its very type, there stands the address of an attribute that the
    type has a slot for; 0 where it has none, or that is not to be seen."""
    if not isinstance(getattr(type(x), name, None), types.MemberDescriptorType):
        return 0
    return _place(x, id(getattr(x, name)))


def _place(x: Any, value: int) -> int:
    """At which byte of x a number stands; 0 where that is not clear, or its type does not stand where it is looked
    for."""
    word = ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_int64 * (type(x).__basicsize__ // word)).from_address(id(x))
    places = [i for i, found in enumerate(words) if found == value]
    return word * places[0] if len(places) == 1 and words[1] == id(type(x)) and word == 8 else 0


def _pointer() -> int | None:
    """Address of torch's function from a tensor to its data pointer, which its own compiled wrappers call."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    if type(found) is not int or sys.platform != "linux":
        return None
    tensor = torch.empty(1, device="cpu")
    function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(found)
    return found if function(tensor) == tensor.data_ptr() else None


class Group:
    """A parameter group as the last step read it."""

    def __init__(self, cls: Any, group: Mapping[str, Any], counted: bool) -> None:
        self.cls, self.counted, self.group = cls, counted, group
        self.keys = tuple(group)
        self.names = _copied(group.get("param_names"))
        self.plan, self.backend = _copied(group.get("plan")), group["backend"]
        self.overrides, self.blocks, self.streams = (group.get(key) for key in ("overrides", "blocks", "streams"))
        self.flags = options.flags_of(cls, group)
        self._read(group)

    def _read(self, group: Mapping[str, Any]) -> None:
        hypers = () if self.counted else self.cls.HYPERS  # counted on a device: read there (`on`)
        self.hypers = {hyper.name: hyper.read(group[hyper.name]) for hyper in hypers}  # may raise
        self.values = tuple(group.values())
        self.sign = -1.0 if group["maximize"] else 1.0
        self.seed = group["seed"]
        # Numbers and text cannot change without being replaced; tensors, lists and dicts can.
        self._known: dict[torch.device, dict[str, Any]] = {}
        self.fixed = fixed(self.cls, group)

    def on(self, device: torch.device) -> dict[str, Any]:
        """The hyper-parameters for a step that is counted on that device."""
        if not self.fixed:
            return self._read_on(device)
        if device not in self._known:
            self._known[device] = self._read_on(device)
        return self._known[device]

    def _read_on(self, device: torch.device) -> dict[str, Any]:
        return {hyper.name: hyper.read_on(self.group[hyper.name], device) for hyper in self.cls.HYPERS}

    def holds(self, group: Mapping[str, Any]) -> bool:
        """Whether the group asks for the same kernels; its hyper-parameters are read again where they may differ.

        ValueError where one is out of its range.
        """
        if group.get("param_names") != self.names:
            return False
        now = group.values()
        self.group = group
        if self.fixed and len(now) == len(self.values) and all(map(is_, now, self.values)):
            return tuple(group) == self.keys
        if (
            tuple(group) != self.keys
            or group["plan"] != self.plan
            or group.get("overrides") != self.overrides
            or group.get("blocks") != self.blocks
            or group.get("streams") != self.streams
            or group["backend"] != self.backend
            or options.flags_of(self.cls, group) != self.flags
        ):
            return False
        self._read(group)
        return True


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, (list, dict)) else value


def fixed(cls: Any, group: Mapping[str, Any]) -> bool:
    """Whether nothing that a step reads of a group can change without being another object."""
    return all(_fixed(group[hyper.name]) for hyper in cls.HYPERS) and _fixed(group["plan"])


def _fixed(value: object) -> bool:
    """Whether it cannot change without being another object."""
    parts = value if type(value) is tuple else (value,)
    return all(part is None or type(part) in (float, int, str) for part in parts)


class Start(Protocol):
    """The kernels of a bucket that have tables of their own, over the tensors of the last step."""

    def __call__(self, scalars: Any, step_key: int) -> None:
        """The step."""

    def follow(self, table: cpu.Table) -> None:
        """Gradients lie where `table` says now; their addresses have kept what they are modulo 16."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a bucket's step was made with.

    table  rows of addresses of p, g and the fields
    start  its kernels, where they have tables of their own; None: the bucket's, with `table`
    room   where the scalars stand of a step that is counted on the device, else None
    counter  what counts it there
    """

    bucket: Bucket
    table: cpu.Table
    start: Start | None = None
    room: control.Control | None = None
    counter: control.Counter | None = None


def may_be_known(bucket: Bucket) -> bool:
    """Whether the host may know what a step that is counted on the device computes its scalars of, and so compute them
    itself (`Known`): where there are host states, it does not know those."""
    return not bucket.variant.host_names


class Part:
    """A bucket, without its tensors: `entries` is where its states stand among those of all buckets."""

    def __init__(self, made: Made, table: cpu.Table, slot: int, entries: slice) -> None:
        bucket = made.bucket
        self.group, self.variant, self.table = bucket.group, bucket.variant, table
        self.start, self.room, self.kernel = made.start, made.room, bucket.kernel
        self.counter = made.counter if made.room is not None and may_be_known(bucket) else None
        self.device = bucket.device
        # Of a DTensor, as torch does, the version of the whole moves, not that of the part.
        written = zip(bucket.params, bucket.shards, strict=True)
        self.written = [p if shard is None else shard.p for p, shard in written]
        self.slot, self.entries = slot, entries
        self.host, count = bucket.variant.host_for(True)
        self.scalars = (ctypes.c_float * count)()
        self.width = count
        self.names = ("step", *bucket.variant.host_names)

    def numbers(self, group: Group, values: Sequence[Any], scaler: control.Scaler | None) -> Count:
        """Fills in the scalars; (step key, the numbers that the states will hold), or the step on the device."""
        sign = group.sign
        if self.room is not None and scaler is None and self.counter is not None:
            done, hypers = self.counter.value, group.on(self.device)
            if done is not None and group.fixed:
                self.scalars[:] = list(self.host(done + 1, sign, **hypers)[: self.width])
                return Known(keys.step_key(group.seed, done + 1), self.counter, done + 1)
        if self.room is not None:
            host = values[self.slot + 1 : self.slot + len(self.names)]
            counted = control.Step(values[self.slot], host, scaler.found if scaler else None)
            counted.fill(
                self.room, self.host, self.width, sign, scaler.scale if scaler else None,
                group.on(self.device), self.names[1:], group.seed if self.variant.stochastic else None,
            )  # fmt: skip
            return counted
        if scaler is not None:
            sign = scaler.factor(sign)
        step = values[self.slot] + 1
        given = dict(zip(self.names[1:], values[self.slot + 1 :], strict=False))
        made = self.host(step, sign, **group.hypers, **given)
        self.scalars[:] = list(made[: self.width])
        return keys.step_key(group.seed, step), [step, *made[self.width :]]

    def run(self, count: Count) -> None:
        key = count.key if isinstance(count, Known) else count[0] if isinstance(count, tuple) else 0
        if self.start is not None:
            on_device = self.room is not None and not isinstance(count, Known)
            self.start(self.room if on_device else self.scalars, key)
        else:
            assert self.kernel is not None
            cpu.call(self.kernel, self.table, self.scalars, key)
        torch.autograd.graph.increment_version(self.written)


class Known:
    """A step that is counted on the device, but whose number the host knows, and so computes the scalars of."""

    __slots__ = ("counter", "key", "number")

    def __init__(self, key: int, counter: control.Counter, number: int) -> None:
        self.key, self.counter, self.number = key, counter, number

    def finish(self) -> None:
        self.counter.tensor.add_(1)
        self.counter.says(self.number)


Count = tuple[int, list[Any]] | control.Step | Known


class Stopped(Exception):
    """A replay that an error broke off among its kernels: the states of what had been stepped, and of what was."""

    def __init__(self, error: BaseException, done: list[dict[str, Any]], at_work: list[dict[str, Any]]) -> None:
        super().__init__()
        self.error, self.done, self.at_work = error, done, at_work


class Replay:
    """What the last step found, to be compared with what the next one finds.

    specs   how DTensors lie: kept, so that no other object takes their place in memory
    frozen  parameters for which ranks may wait for one another once they are trained
    quiet   what holds while tensors are compared: DTensors are asked for attributes as plain tensors are, which torch
            would look up a function for each time (a third of the comparison)
    """

    def __init__(
        self, probe: Probe, cls: Any, groups: Sequence[Mapping[str, Any]], parts: list[Part], scaled: bool
    ) -> None:
        self.probe = probe
        counted = {part.group for part in parts if part.room is not None}
        self.groups = [Group(cls, group, number in counted) for number, group in enumerate(groups)]
        self.parts = parts
        self.starts = [(part.start, part.table) for part in parts if part.start is not None]
        self.on_host = any(part.room is None for part in parts)
        self.scaled = scaled
        self.specs: list[object] = []
        self.frozen: list[Tensor] = []
        self.quiet: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.around = _around(parts)
        self.script = array("q")
        self.numbers = array("q")
        self.values: list[Any] = []
        self.blank: list[None] = []
        self.grads: list[Tensor | None] = []
        self.entries: list[dict[str, Any] | None] = []

    def again(self, groups: Sequence[dict[str, Any]], state: dict[Any, Any], scaler: control.Scaler | None) -> bool:
        """Make the step, if it is like the last one; False, and nothing has changed, if not.

        ValueError where a hyper-parameter is out of its range; nothing has changed then either.  Stopped where a kernel
        raises an error.
        """
        if len(groups) != len(self.groups) or (scaler is not None) != self.scaled or _around(self.parts) != self.around:
            return False
        if self.frozen and any(p.requires_grad for p in self.frozen):
            return False
        for known, group in zip(self.groups, groups, strict=True):
            if not known.holds(group):
                return False
        probe, grads, entries = self.probe, self.grads, self.entries
        lists = [group["params"] for group in groups]
        try:
            with self.quiet():
                differs = probe.compare(
                    lists, state, grads, entries, probe.names, None,
                    self.script.buffer_info()[0], self.numbers.buffer_info()[0],
                    probe.reader, probe.pointer, probe._shim, probe._slots, probe._moved,
                )  # fmt: skip
            if differs:
                return False
            moved, shifted = probe.moved
            if shifted and self.starts:  # launches depend on it
                return False
            if moved:
                for start, table in self.starts:
                    start.follow(table)
            if scaler is not None and self.on_host and scaler.found_infinity():
                return True
            made = [part.numbers(self.groups[part.group], self.values, scaler) for part in self.parts]
            done = 0
            try:
                for part, count in zip(self.parts, made, strict=True):
                    part.run(count)
                    if isinstance(count, tuple):
                        self._finish(part, count[1])
                    else:
                        count.finish()
                    done += 1
            except BaseException as error:
                held: Any = entries
                begin = self.parts[done].entries if done < len(self.parts) else slice(0, 0)
                raise Stopped(error, held[: begin.start], held[begin]) from None
        finally:
            grads[:] = self.blank
            entries[:] = self.blank
        return True

    def _finish(self, part: Part, values: list[Any]) -> None:
        for i, (name, value) in enumerate(zip(part.names, values, strict=True)):
            for entry in self.entries[part.entries]:
                entry[name] = value  # type: ignore[index]
            self.values[part.slot + i] = value
            self.numbers[part.slot + i] = id(value)


def record(
    cls: Any,
    groups: Sequence[dict[str, Any]],
    state: Mapping[Any, Any],
    made: Sequence[Made],
    scaled: bool,
) -> Replay | None:
    """The replay of a step that these buckets made; None where it has what the library does not compare.

    scaled   whether there was a GradScaler
    Nothing in the step waits for another rank: parts of tensors are stepped as they lie.
    """
    library = probe()
    if library is None or any(type(group["params"]) is not list for group in groups):
        return None
    places: dict[int, tuple[int, int, int]] = {}  # id of the parameter: (bucket, position in it, address of its row)
    parts, slot, begin = [], 0, 0
    for number, one in enumerate(made):
        bucket = one.bucket
        if bucket.written:
            return None
        table = replace(one.table, rows=one.table.rows[:])  # the launcher knows the other one by the addresses in it
        row = table.address
        for i, p in enumerate(bucket.params):
            shard = bucket.shards[i]
            places[id(p if shard is None else shard.p)] = (number, i, row if p.numel() else 0)
            row += 8 * table.width if p.numel() else 0
        parts.append(Part(one, table, slot, slice(begin, begin + len(bucket.params))))
        slot += len(parts[-1].names)
        begin += len(bucket.params)
    kept = Replay(library, cls, groups, parts, scaled)
    kept.blank = [None] * begin
    kept.grads, kept.entries = list(kept.blank), list(kept.blank)
    script: list[int] = [len(groups)]
    for group in groups:
        script.append(len(group["params"]))
        for p in group["params"]:
            place = places.get(id(p))
            if place is None:
                script += (id(p), -1)
            else:
                bucket, spec = made[place[0]].bucket, 0
                if bucket.shards[place[1]] is not None:
                    library.know(p)
                    kept.specs.append(p._spec)
                    spec = id(p._spec)
                here = bucket.params[place[1]]
                script += (id(p), library.code(bucket.grad_dtype), place[2], spec, *_form(library, here))
            if sharding.is_sharded(p) and not p.requires_grad:
                kept.frozen.append(p)
    script.append(len(state))
    for p, entry in state.items():
        place = places.get(id(p))
        if place is None:
            script += (id(p), -1)
            continue
        number, i, row = place
        part = parts[number]
        script += (id(p), part.entries.start + i, row, len(entry))
        columns = {name: 2 + k for k, name in enumerate(part.variant.names)}
        slots = {name: part.slot + k for k, name in enumerate(part.names)}
        for name, value in entry.items():
            if name in slots:
                script += (id(name), _NUMBER, slots[name])
            elif name in columns:
                kind = _SHARD if sharding.is_sharded(value) else _TENSOR
                here = made[number].bucket.states[i][name]
                script += (id(name), kind, id(value), columns[name], *_form(library, here))
            else:
                script += (id(name), _OTHER)
    for bucket, part in zip((one.bucket for one in made), parts, strict=True):
        first = bucket.states[0]
        if any(s[name] is not first[name] for s in bucket.states for name in part.names):
            return None
        kept.values += [first[name] for name in part.names]
    if any(library.code(dtype) < 0 for dtype in library._codes):
        return None
    if kept.specs and all(type(p) in (Tensor, Parameter, sharding.kind()) for group in groups for p in group["params"]):
        kept.quiet = torch._C.DisableTorchFunctionSubclass
    kept.script.extend(script)
    kept.numbers.extend(map(id, kept.values))
    return kept


def _form(library: Probe, tensor: Tensor) -> tuple[int, ...]:
    return (library.device(tensor), library.code(tensor.dtype), tensor.ndim, *tensor.shape)


def _around(parts: Sequence[Part]) -> tuple[int, ...]:
    """What else launches depend on: how they are tuned, and the streams that they are put into."""
    return (tunings, *(torch.cuda.current_stream(p.device).cuda_stream for p in parts if p.device.type == "cuda"))


class Keeper:
    """An optimizer's replay, and how long it waits before it makes another."""

    def __init__(self) -> None:
        self.last: Replay | None = None
        self._wait = 0
        self._left = 0

    def again(
        self, groups: Sequence[dict[str, Any]], state: dict[Any, Any], scaler: control.Scaler | None = None
    ) -> bool:
        """As `Replay.again`; what did not fit, or broke off, is forgotten.  Not while a CUDA graph takes the step up:
        it has tables of its own."""
        last = self.last
        if last is None or control.capturing():
            return False
        self.last = None  # an error may leave it with addresses that no table on the device has
        if last.again(groups, state, scaler):
            self.last = last
            self._wait = self._left = 0
            return True
        return False

    def holds(self, p: Tensor) -> int:
        """How often it refers to a parameter."""
        return 0 if self.last is None else sum(q is p for part in self.last.parts for q in part.written)

    def keep(
        self, cls: Any, groups: Sequence[dict[str, Any]], state: Mapping[Any, Any], made: Sequence[Made], scaled: bool
    ) -> None:
        """After a step the long way: `made` are its buckets with what they were made with."""
        if self._left > 0:
            self._left -= 1
            return
        if not made or control.capturing():
            return
        self.last = record(cls, groups, state, made, scaled)
        self._left, self._wait = self._wait, min(2 * self._wait + 1, PATIENCE)
