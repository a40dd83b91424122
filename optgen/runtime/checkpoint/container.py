"""The file of a checkpoint: a safetensors file with a SHA-256 of all its bytes in its metadata.

Tensors have the names of their places (`model.embed.weight`). All else is JSON in the metadata, where
{"tensor": name} refers to a tensor, {"tuple": [...]} is a tuple and {"dict": [[key, value], ...]} a dict.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import math
import mmap
import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.checkpoint.atomic import instead_of

VERSION = 1
"""The version of the content's structure; the optimizer's part has a version of its own (checkpoint.py)."""

HEAD = b'{"__metadata__":{"optgen_sha256":"'
"""The first bytes of a file behind the length of its header; 64 digits follow, which count as zeros in the sum."""

DIGITS = slice(8 + len(HEAD), 8 + len(HEAD) + 64)

ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of torch.save."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""The dtypes of safetensors that a file may have."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

DICTS: Mapping[str, type[dict[Any, Any]]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
"""The mappings that come back as what they were."""

UNREADABLE = (
    UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, AssertionError,
    ArithmeticError, MemoryError, struct.error,
)  # fmt: skip
"""The errors of reading bytes that nobody wrote: torch.load runs whatever they say."""

Path_ = str | os.PathLike[str]


class CheckpointError(ValueError):
    """A file that is damaged, cut short, or no checkpoint."""


# -- writing ---------------------------------------------------------------------------------------------------


def write(path: Path_, content: Mapping[str, Any]) -> None:
    """Write a dict of plain values and tensors, all of it or nothing.

    Raises TypeError, with the place, for a value that would not come back as what it is.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(content, (), tensors, {}))
    header: dict[str, Any] = {"__metadata__": {"optgen_sha256": "0" * 64, "format": "pt", "optgen": text}}
    end = 0
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each is aligned
    for name in names:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()
    with instead_of(Path(path)) as file:
        for data in itertools.chain((struct.pack("<Q", len(head)), head), (_bytes(tensors[name]) for name in names)):
            digest.update(data)
            file.write(data)
        file.seek(DIGITS.start)
        file.write(digest.hexdigest().encode())


def _bytes(t: Tensor) -> Any:
    """Return a tensor's bytes as a buffer."""
    if not t.numel():
        return b""
    t = t.cpu().contiguous()
    found: Any = (ctypes.c_char * t.nbytes).from_address(t.data_ptr())
    found.owner = t  # keeps the memory
    return found


def _encoded(value: Any, place: tuple[Any, ...], tensors: dict[str, Tensor], seen: dict[object, str]) -> Any:
    """Return a value as JSON takes it; its tensors go into `tensors`, each once, and `seen` has their names."""
    if isinstance(value, Tensor):
        return _reference(value, place, tensors, seen)
    if type(value) in DICTS.values():
        pairs = [[_key(key, place), _encoded(x, (*place, key), tensors, seen)] for key, x in value.items()]
        return {next(name for name, kind in DICTS.items() if kind is type(value)): pairs}
    if type(value) in (list, tuple, torch.Size):
        parts = [_encoded(x, (*place, i), tensors, seen) for i, x in enumerate(value)]
        return parts if type(value) is list else {"tuple": parts}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{_where(place)}: expected tensors, numbers, strings, None, lists, tuples or dicts (also Counter and "
        f"OrderedDict), got {type(value).__module__}.{type(value).__name__}: loading runs no code, so convert it first"
    )


def _key(key: Any, place: tuple[Any, ...]) -> Any:
    """Return a dict's key as JSON takes it."""
    parts = key if type(key) is tuple else (key,)
    if all(part is None or type(part) in (bool, int, float, str) for part in parts):
        return {"tuple": list(key)} if type(key) is tuple else key
    raise TypeError(
        f"{_where(place)}: expected keys of numbers, strings, None or tuples of these, got {key!r:.80} of "
        f"{type(key).__module__}.{type(key).__name__}: loading runs no code, so convert it first"
    )


def _reference(value: Tensor, place: tuple[Any, ...], tensors: dict[str, Tensor], seen: dict[object, str]) -> Any:
    """Return the reference to a tensor, which is stored unless it was already."""
    refuse_sharded(_where(place), value)
    if without := checkpoint.without_values(value):
        raise TypeError(f"{_where(place)}: expected a tensor with values, got one {without}")
    if value.dtype not in NAMES:
        raise TypeError(f"{_where(place)}: expected a tensor of a dtype of safetensors, got one of {value.dtype}")
    value = value.resolve_neg()
    same = value.data_ptr() or id(value), value.device, value.dtype, value.shape, value.stride()
    if same not in seen:
        name = ".".join(map(str, place))
        names = itertools.chain((name,), (f"{name}#{n}" for n in itertools.count(2)))  # {"a": {"b": ...}, "a.b": ...}
        seen[same] = next(name for name in names if name not in tensors)
        tensors[seen[same]] = value.detach()
    return {"tensor": seen[same]}


def refuse_sharded(where: str, value: Tensor) -> None:
    """Raise TypeError for a tensor of a class that a file does not keep."""
    if type(value) not in (Tensor, nn.Parameter, nn.Buffer):
        raise TypeError(
            f"{where}: expected a plain tensor, got {type(value).__name__} "
            f"(sharded tensors are for torch.distributed.checkpoint)"
        )


def _where(place: tuple[Any, ...]) -> str:
    """Return the name of a place in the content for an error message."""
    return f"{place[0]}" + "".join(f"[{key!r}]" for key in place[1:]) if place else "the checkpoint"


# -- reading ---------------------------------------------------------------------------------------------------


def read(path: Path_) -> dict[str, Any]:
    """Return the content of a checkpoint, its tensors on the CPU and backed by the file.

    Raises CheckpointError for a file that is damaged or no checkpoint.
    """
    path = Path(path)
    if is_of_torch(path):
        raise CheckpointError(
            f"{path} is a file of torch.save, not one of save_checkpoint, which is a safetensors file. The optimizer's "
            f'state dict in it is loaded by opt.load_state_dict(torch.load({str(path)!r})["optimizer"]), under the key '
            f"that it was saved with; `optgen convert` gives it another plan"
        )
    with path.open("rb") as file:
        begin = file.read(DIGITS.stop)
    own, digits = begin[8:].startswith(HEAD), begin[DIGITS].decode(errors="replace")
    if own and (found := _sum(path)) != digits:
        raise CheckpointError(f"{path} is damaged: its checksum is {found[:16]}..., expected {digits[:16]}...")
    metadata, tensors = _open(path)
    if not own:
        raise CheckpointError(f"{path} is no optgen checkpoint: it does not begin with the checksum of one")
    try:
        content = _decoded(json.loads(metadata["optgen"]), tensors)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be loaded: its text lists no content: {error!r:.80}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dict")
    version = content.get("optgen_checkpoint")
    if version is None:
        raise CheckpointError(f"{path} is no optgen checkpoint")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(f"{path}: expected a file of version {VERSION}, got {version}: made by a newer optgen?")
    if lacks := {"about", "optimizer", "waiting", "model", "extra"} - content.keys():
        raise CheckpointError(f"{path} is no whole checkpoint: it has no {', '.join(sorted(lacks))}")
    return content


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_encoded` made JSON of."""
    if isinstance(value, list):
        return [_decoded(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "tuple":
        return tuple(_decoded(x, tensors) for x in inside)
    return DICTS[kind]({_decoded(k, tensors): _decoded(x, tensors) for k, x in inside})


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return the tensors of any safetensors file, backed by it; CheckpointError if it is none."""
    return _open(path)[1]


def _open(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (metadata, tensors) of a safetensors file."""
    with path.open("rb") as file:
        begin = file.read(9)
        if len(begin) < 9 or begin[8:] != b"{":
            raise CheckpointError(
                f"{path} is no checkpoint: it does not begin like a file of torch.save, nor like a safetensors file"
            )
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(begin[:8], "little")
    found, end = {}, start
    try:
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__", {})
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, (first, stop) = DTYPES[one["dtype"]], one["data_offsets"]
            if start + first != end or stop < first or stop - first != math.prod(one["shape"]) * dtype.itemsize:
                raise ValueError(f"{name} is not where its header says")
            part = torch.empty(0, dtype=torch.uint8, device="cpu")
            if stop > first:  # a storage of its own
                part = torch.frombuffer(data, dtype=torch.uint8, count=stop - first, offset=end)
            part = part.clone() if end % dtype.itemsize else part
            found[name], end = part.view(dtype).view(one["shape"]), start + stop
        if end != len(data):
            raise ValueError(f"its tensors end at byte {end}, the file at {len(data)}")
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be loaded: {error!r:.120}") from error
    return metadata, found


def _sum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, of which DIGITS count as zeros."""
    found, left, digits = hashlib.sha256(), path.stat().st_size, True
    with path.open("rb") as file:
        while left:
            data = file.read(min(left, 1 << 22))
            if not data:
                raise CheckpointError(f"{path} became shorter while it was read")
            left -= len(data)
            if digits:
                data, digits = data[: DIGITS.start] + b"0" * 64 + data[DIGITS.stop :], False
            found.update(data)
    return found.hexdigest()


# -- archives of torch.save ------------------------------------------------------------------------------------


def is_of_torch(path: Path) -> bool:
    """Return True for an archive, as torch.save writes it."""
    with path.open("rb") as file:
        return file.read(len(ARCHIVE)) == ARCHIVE


def load_torch(path: Path) -> dict[str, Any]:
    """Return the dict in a file of torch.save, without running code; CheckpointError if it holds anything else."""
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
