"""Checkpoints as files: one file for optimizer, model and whatever else a run wants back.

A file is what `torch.save` writes, with a checksum of all of it at its end (the comment of the zip archive, which
torch.load reads over); or, under a name that ends in .safetensors, a safetensors file with the same in its metadata.
It is written beside its place and renamed, so that there is always the old file or the new one, whoever is killed when.
Reading checks everything before anything changes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import math
import os
import platform
import re
import secrets
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.checkpoint.content import problem
from optgen.runtime.layout import layout, plans, sharding
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options import options
from optgen.runtime.records import dtype_of
from optgen.runtime.records.misfits import Misfits
from optgen.runtime.states import low_bits
from optgen.runtime.states.state import describe, problems
from optgen.runtime.states.state import of as state_of

VERSION = 1
"""Of the file's own structure; what is in the optimizer's part has a version of its own (checkpoint.py)."""

MARK = b"optgen checkpoint sha256 "
COMMENT = len(MARK) + 64
END = 22  # bytes of a zip archive's end record without its comment

UNREADABLE = (
    UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError,
    ArithmeticError, MemoryError, struct.error,
)  # fmt: skip
"""What torch.load raises where bytes are no pickle that it wrote, or not all of it: it runs whatever they say."""

DICTS: Mapping[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
"""The mappings that torch loads without running code; the others would come back as something else."""

Path_ = str | os.PathLike[str]


class CheckpointError(ValueError):
    """A file that is damaged, cut short, or no checkpoint."""


def save_checkpoint(path: Path_, optimizer: Optimizer, model: nn.Module | None = None, extra: Any = None) -> None:
    """Write a checkpoint from which a run goes on bit for bit; an older file of that name stays until it is complete.

    model   its state dict is written too, parameters and buffers in their own dtypes
    extra   anything made of tensors, numbers, strings, None, lists, tuples and dicts (also Counter and OrderedDict):
            schedulers, loaders, the step
    A path that ends in .safetensors gives a safetensors file (that package must be installed).

    TypeError for what could not be read back without running code; OSError where the file cannot be written.
    """
    params = _parameters(optimizer)
    for p in params:
        if sharding.is_sharded(p):  # before a value is looked at: ranks would wait for those that are not here
            raise _sharded("optimizer", p)
    content = {
        "optgen_checkpoint": VERSION,
        "about": about(optimizer, model),
        "optimizer": optimizer.state_dict(),
        "model": None if model is None else dict(model.state_dict()),
        "waiting": [bits if _fits(bits, p) else None for bits, p in zip(_waiting(optimizer), params, strict=True)],
        "extra": extra,
    }
    write(path, content)


def load_checkpoint(path: Path_, optimizer: Optimizer, model: nn.Module | None = None) -> Any:
    """Take over a checkpoint; returns the `extra` that it was saved with, its tensors on the CPU.

    model   must be given what was saved of it to go on; without it only the optimizer is loaded
    CheckpointError for a file that is damaged or no checkpoint, ValueError listing what does not fit: then neither the
    optimizer nor the model has changed.
    """
    content = read(path)
    misfits = Misfits(f"{os.fspath(path)} does not fit, nothing was loaded")
    name = plans.generated_class(type(optimizer)).__name__
    if content["about"]["class"] != name:
        misfits.add(f"expected a checkpoint of {name}, got one of {content['about']['class']}")
    else:
        for line in misread(type(optimizer), optimizer.defaults, content):
            misfits.add(line)
    if model is not None:
        _compare(model, content["model"], misfits)
    misfits.stop()
    before = optimizer.state, optimizer.param_groups
    waiting = _waiting(optimizer)
    order = checkpoint.positions(optimizer.param_groups, content["optimizer"]["param_groups"], misfits)
    if model is not None:
        _same_places(optimizer, model, content["about"]["parameters"], order, misfits)
        misfits.stop()
    optimizer.load_state_dict(content["optimizer"])
    if model is not None:
        try:
            model.load_state_dict(content["model"])
        except BaseException:
            optimizer.state, optimizer.param_groups = before
            for p, bits in zip(_parameters(optimizer), waiting, strict=True):
                if bits is not None:
                    setattr(p, low_bits.ATTRIBUTE, bits)
            low_bits.carry(model)
            raise
        for p in _parameters(optimizer):
            kept = content["waiting"][order[id(p)]]
            if kept is not None and state_of(optimizer.state, p) is None:
                setattr(p, low_bits.ATTRIBUTE, _in_memory(kept))
        low_bits.carry(model)
    return _in_memory(content["extra"])


def _in_memory(value: Any) -> Any:
    """Copies of tensors that are still in the file."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({k: _in_memory(v) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_in_memory(v) for v in value)
    return value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def about(optimizer: Optimizer, model: nn.Module | None) -> dict[str, Any]:
    """What tools need to read the optimizer's part without it: its class, and what its parameters are."""
    generated = plans.generated_class(type(optimizer))
    keys = {} if model is None else _keys(model)
    parameters = [
        {"key": keys.get(id(p)), "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch.")}
        for p in _parameters(optimizer)
    ]
    return {
        "class": generated.__name__, "spec": generated.SPEC, "parameters": parameters,
        "readings": _readings(optimizer),
    }  # fmt: skip


def _keys(model: nn.Module) -> dict[int, str]:
    """id(tensor) -> its key in the model's state dict, the first one of a tied weight."""
    return {id(t): name for name, t in reversed(model.state_dict(keep_vars=True).items())}


READ = 64
"""At least so many elements of a state have their values in a file, beside their codes."""


def _readings(optimizer: Optimizer) -> list[list[Any]]:
    """[position, state, its first values]: what codes mean at present, of the smallest parameter of each kernel."""
    smallest: dict[object, tuple[int, int, Mapping[str, Any], Tensor, plans.Label]] = {}
    position = -1
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            position += 1
            if state_of(optimizer.state, p) and p.numel():
                name = _label(group, place, position)
                _, plan, variant = checkpoint.select(type(optimizer), group, p, name)
                key = plan, variant
                if key not in smallest or p.numel() < smallest[key][0]:
                    smallest[key] = p.numel(), position, group, p, name
    found = []
    for _, at, chosen, p, name in smallest.values():
        values = _decoded(type(optimizer), chosen, p, optimizer.state[p], name)
        found += [[at, name, numbers] for name, numbers in values.items()]
    return found


def _label(group: Mapping[str, Any], place: int, position: int) -> plans.Label:
    """What a group calls its parameter at a place."""
    label: plans.Label = position if group.get("param_names") is None else group["param_names"][place]
    return label


def _decoded(
    cls: type, group: Mapping[str, Any], p: Tensor, kept: Mapping[str, Any], label: plans.Label
) -> dict[str, list[float]]:
    """The first values of every state that is kept in codes; nothing where the state does not fit the plan."""
    _, plan, variant = checkpoint.select(cls, group, p, label)
    coded = [name for name in variant.states if not variant.is_plain(name)]  # element-wise, all of them
    if not coded or any(problems(variant, p, kept)):
        return {}
    with torch.no_grad():
        values = layout.first(plan, variant, p, kept, coded, READ)
    return {name: values[name].reshape(-1)[:READ].tolist() for name in coded}


def misread(cls: type, defaults: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Which states would be read as other numbers than they were when they were saved: the plan of that name has
    become another one since.  What does not fit it in shape is left to loading."""
    facts, saved = content["about"], content["optimizer"]
    rows = [(group, place, n) for group in saved["param_groups"] for place, n in enumerate(group["params"])]
    lines = []
    for at, name, values in facts["readings"]:
        old_group, place, number = rows[at]
        kept = saved["state"].get(number)
        one = facts["parameters"][at]
        if not isinstance(kept, Mapping):
            continue
        if not all(checkpoint.has_values(value) for value in kept.values() if isinstance(value, Tensor)):
            continue
        try:
            group, entries = checkpoint.migrated(old_group, {number: kept})
            group = {**group, **options.check(cls, {**defaults, **group})}
            p = torch.empty(one["shape"], dtype=dtype_of(one["dtype"]), device="cpu")
            label = _label(group, place, at)
            kept = checkpoint.renamed(cls, {**defaults, **group}, p, label, entries[number])
            now = _decoded(cls, {**defaults, **group}, p, kept, label).get(name, values)
        except (TypeError, ValueError, RuntimeError):  # no such plan, or not for this dtype; no room for such a shape
            continue
        # Far more than machines differ by, far less than the codes of one curve differ from those of another.
        for old, new in zip(values, now, strict=True):
            if not (math.isclose(old, new, rel_tol=2**-12) or (math.isnan(old) and math.isnan(new))):
                lines.append(
                    f"parameter {at}: {name} was saved as {old:.6g}, and plan {group['plan']!r} reads it as {new:.6g}: "
                    f"it is not the plan that the checkpoint was made with"
                )
                break
    return lines


def _waiting(optimizer: Optimizer) -> list[Any]:
    """Low bits that no step has taken yet, by position."""
    return [p.__dict__.get(low_bits.ATTRIBUTE) for p in _parameters(optimizer)]


def _fits(bits: Any, p: Tensor) -> bool:
    """Whether low bits belong to a weight, and not to one that had its place before it was cut or grown."""
    return bits is not None and bits["low"].shape == p.shape


def _compare(model: nn.Module, saved: Any, misfits: Misfits) -> None:
    if not isinstance(saved, Mapping):
        misfits.add("it has no model: it was saved without one; load the weights first, then the optimizer alone")
        return
    live = model.state_dict(keep_vars=True)
    for name in (n for n in live if n not in saved):
        misfits.add(f"model: {name}: expected {_what(live[name])}, it is missing")
    for name in (n for n in saved if n not in live):
        misfits.add(f"model: {name}: not expected, the model has none of that name")
    for name in (n for n in live if n in saved):
        if _what(live[name]) != _what(saved[name]):
            misfits.add(f"model: {name}: expected {_what(live[name])}, got {_what(saved[name])}")


def _same_places(
    optimizer: Optimizer,
    model: nn.Module,
    saved: Sequence[Mapping[str, Any]],
    order: Mapping[int, int],
    misfits: Misfits,
) -> None:
    """Parameters without names are known by their places: where these hold other weights of the model than they did,
    each would go on with another's state.
    """
    keys, live = _keys(model), model.state_dict(keep_vars=True)
    position = -1
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            position += 1
            now, then = keys.get(id(p)), saved[order[id(p)]].get("key") if id(p) in order else None
            if now is not None and then is not None and live.get(then) is not p:  # a tied weight has several keys
                misfits.add(f"{_label(group, place, position)}: expected the state of {now}, got that of {then}")


def _what(value: Any) -> str:
    return describe(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


# -- any content, whole or not at all --------------------------------------------------------------------------


def write(path: Path_, content: Mapping[str, Any]) -> None:
    """Write a dict of plain values and tensors, all of it or nothing."""
    path = Path(path)
    plain = _plain(content, "")
    write_to = _write_safetensors if path.suffix == ".safetensors" else _write_zip
    with instead_of(path) as file:
        write_to(file, plain)


def read(path: Path_) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU; CheckpointError where it is damaged or none."""
    path = Path(path)
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_zip(path)
    version = content.get("optgen_checkpoint")
    if version is None:
        raise CheckpointError(f"{path} is no optgen checkpoint")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path}: expected a file of version {VERSION}, got {version}: made by a newer optgen?")
    lacks = problem(content)
    if lacks:
        raise CheckpointError(f"{path} is no whole checkpoint: {lacks}")
    return content


def _sharded(where: str, value: Tensor) -> TypeError:
    return TypeError(
        f"{where}: expected a plain tensor, got {type(value).__name__} "
        f"(sharded tensors are for torch.distributed.checkpoint)"
    )


def _plain(value: Any, where: str) -> Any:
    """The value with parameters as tensors; TypeError for what would not come back as it is, or weights_only refuse."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            raise _sharded(where or "the checkpoint", value)
        return value.detach()
    if type(value) in DICTS.values():
        inside = {_key(k, where): _plain(v, f"{where}[{k!r}]" if where else str(k)) for k, v in value.items()}
        return type(value)(inside)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple, torch.Size):
        made = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return made if type(value) is list else tuple(made)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where or 'the checkpoint'}: expected tensors, numbers, strings, None, lists, tuples or dicts (also Counter "
        f"and OrderedDict), got "
        f"{type(value).__module__}.{type(value).__name__}: loading runs no code, so convert it first"
    )


def _key(key: Any, where: str) -> Any:
    """The key of a dict, which has to come back as it is; TypeError where it would not."""
    parts = key if type(key) is tuple else (key,)
    if all(part is None or type(part) in (bool, int, float, str) for part in parts):
        return key
    raise TypeError(
        f"{where or 'the checkpoint'}: expected keys of numbers, strings, None or tuples of these, got {key!r:.80} of "
        f"{type(key).__module__}.{type(key).__name__}: loading runs no code, so convert it first"
    )


@contextmanager
def instead_of(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends well; else it is deleted.

    An OSError names `path`: nobody knows the new file.
    """
    _sweep(path)
    made = path
    try:
        made, descriptor = _begun(path)
        try:
            held = os.dup(descriptor) if os.name == "posix" else None  # the lock ends with the last of its descriptors
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, path)
            finally:
                if held is not None:
                    os.close(held)
        except BaseException:
            with suppress(OSError):
                made.unlink()
            raise
    except OSError as error:
        if made == path and isinstance(error, FileNotFoundError):
            why = f"there is no folder {str(path.parent)!r}; make it first"
            raise FileNotFoundError(error.errno, why, str(path)) from None
        if error.filename is not None and str(error.filename) not in (str(made), str(path)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    if hasattr(os, "O_DIRECTORY"):  # the name is safe only when the folder is
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _begun(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, locked where the file system has locks: so `_sweep` sees that it is being written."""
    while True:
        made = path.with_name(f".{path.name}.{_machine()}{secrets.token_hex(4)}.tmp")
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if _lock(descriptor) is not False and made.exists():
            return made, descriptor
        os.close(descriptor)  # another save swept it before it was locked


def _sweep(path: Path) -> None:
    """Delete what saves to `path` have left that were killed on this machine: nobody has a lock on it.

    Process numbers would not tell: they are given again, and containers count their own.
    """
    left = re.compile(rf"\.{re.escape(path.name)}\.{_machine()}[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDWR)
                    try:
                        if _lock(descriptor):
                            os.unlink(entry.path)
                    finally:
                        os.close(descriptor)


def _machine() -> str:
    """A hash of this machine's name: locks on a shared file system may be known to one machine alone."""
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def _lock(descriptor: int) -> bool | None:
    """Lock a file until it is closed; False where another process has locked it, None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


# -- as a zip archive ------------------------------------------------------------------------------------------


class _Hashing:
    """A file that hashes what is written; its last bytes are held back, to be changed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.hash, self.end = file, hashlib.sha256(), b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if len(data) >= END:
            self._put(self.end)
            self._put(data[:-END])
            self.end = bytes(data[-END:])
        else:
            whole = self.end + bytes(data)
            self._put(whole[:-END])
            self.end = whole[-END:]
        return len(data)

    def _put(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing to do before the end is known."""


def _write_zip(file: IO[bytes], content: Mapping[str, Any]) -> None:
    hashing = _Hashing(file)
    try:
        torch.save(content, hashing)  # type: ignore[arg-type]
    except RuntimeError as error:  # torch's own, when it ends its archive in a file that could not be written
        raise hashing.error or error from None
    hashing._put(hashing.end[:-2] + struct.pack("<H", COMMENT))
    file.write(MARK + hashing.hash.hexdigest().encode())


def _read_zip(path: Path) -> dict[str, Any]:
    check_bytes(path)
    return load_torch(path)


def load_torch(path: Path) -> dict[str, Any]:
    """What torch.save wrote, without running code; CheckpointError where it holds more than values or is none."""
    _check_begin(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is what a cut archive is to torch
            raise
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} cannot be loaded: {said}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict")
    return found


def has_checksum(path: Path) -> bool:
    """Whether the file ends as those of `save_checkpoint` do."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - COMMENT))
        return file.read().startswith(MARK)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of any safetensors file."""
    package = _safetensors()
    try:
        found: dict[str, Tensor] = package.torch.load_file(path)
    except package.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    return found


def _check_begin(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise CheckpointError(f"{path} is no checkpoint: it does not begin like a file of torch.save")


def check_bytes(path: Path) -> None:
    """CheckpointError unless every byte is as it was written."""
    size = path.stat().st_size
    _check_begin(path)
    with path.open("rb") as file:
        file.seek(max(0, size - COMMENT))
        comment = file.read()
        if not comment.startswith(MARK):
            if not zipfile.is_zipfile(path):
                raise CheckpointError(f"{path} has no checksum at its end: it was cut short")
            raise CheckpointError(
                f"{path} has no checksum at its end: it was not written by save_checkpoint. The optimizer's state dict "
                f'in a file of torch.save is loaded by opt.load_state_dict(torch.load({str(path)!r})["optimizer"]), '
                f"under the key that it was saved with; `optgen convert` gives it another plan"
            )
        file.seek(0)
        found = hashlib.sha256()
        left = size - COMMENT
        while left:
            data = file.read(min(left, 1 << 22))
            if not data:
                raise CheckpointError(f"{path} became shorter while it was read")
            found.update(data)
            left -= len(data)
    if comment[len(MARK) :] != found.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its checksum is {found.hexdigest()[:16]}..., expected "
                              f"{comment[len(MARK) :][:16].decode(errors='replace')}...")  # fmt: skip


# -- as a safetensors file -------------------------------------------------------------------------------------


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files named .safetensors need the package safetensors: pip install safetensors") from error
    return safetensors


def _write_safetensors(file: IO[bytes], content: Mapping[str, Any]) -> None:
    package = _safetensors()
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_listed(content, tensors, {}, ""))
    metadata = {"format": "pt", "optgen": text, "sha256": _digest(text, tensors)}
    file.write(package.torch.save(tensors, metadata=metadata))


def _read_safetensors(path: Path) -> dict[str, Any]:
    package = _safetensors()
    try:
        with package.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except package.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    if "optgen" not in metadata:
        raise CheckpointError(f"{path} is no optgen checkpoint")
    rest = {k: v for k, v in metadata.items() if k not in ("optgen", "sha256")}
    if rest != {"format": "pt"} or metadata.get("sha256") != _digest(metadata["optgen"], tensors):
        raise CheckpointError(f"{path} is damaged: its checksum is not that of its content")
    try:
        found = _unlisted(json.loads(metadata["optgen"]), tensors)
    except (LookupError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be loaded: its text lists no content: {error!r:.80}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a dict")
    return found


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        found.update(f"\n{name} {describe(t.dtype, tuple(t.shape))}\n".encode())
        if t.numel():
            t = t.detach().cpu().contiguous()
            found.update((ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr()))
    return found.hexdigest()


def _listed(value: Any, tensors: dict[str, Tensor], seen: dict[object, str], where: str) -> Any:
    """The content as JSON takes it; tensors go into `tensors` under the names of their places, each once."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            kind = "meta" if value.is_meta else str(value.dtype if value.is_quantized else value.layout)
            raise TypeError(f"{where}: a safetensors file holds dense tensors with values, got a {kind} one")
        same = (value.data_ptr() or id(value), value.dtype, value.shape, value.stride())
        if same not in seen:
            name = next(n for n in itertools.chain((where,), map(f"{where}#{{}}".format, itertools.count(2)))
                        if n not in tensors)  # {"a": {"b": ...}, "a.b": ...}  # fmt: skip
            seen[same], tensors[name] = name, value.contiguous()
        return {"tensor": seen[same]}
    if isinstance(value, dict):
        parts = []
        for k, v in value.items():
            place = f"{where}.{k}" if where else str(k)
            parts.append([_listed(k, tensors, seen, place), _listed(v, tensors, seen, place)])
        return {next(name for name, kind in DICTS.items() if kind is type(value)): parts}
    if isinstance(value, (list, tuple)):
        found = [_listed(v, tensors, seen, f"{where}.{i}") for i, v in enumerate(value)]
        return found if isinstance(value, list) else {"tuple": found}
    return value


def _unlisted(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unlisted(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    makers: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda name: tensors[name],
        "tuple": lambda parts: tuple(_unlisted(v, tensors) for v in parts),
    }
    ((kind, content),) = value.items()
    if kind in DICTS:
        return DICTS[kind]({_unlisted(k, tensors): _unlisted(v, tensors) for k, v in content})
    return makers[kind](content)
