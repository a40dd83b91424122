"""The addresses and layouts of tensors, which a step compares with those of the step before.

One call of C++ reads them all (optgen/runtime/cpu/cpp/look.h), through the functions that torch exports for DLPack.
Where there is no compiler, Python reads one after the other.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from optgen.runtime.cpu import native


class Seen(NamedTuple):
    """Addresses, and dtypes, devices, shapes and contiguity in a form to be compared; None where tensors are missing or
    are of other ranks than before."""

    addresses: array[int]
    layouts: Any


def look(keys: list[str], dicts: list[Any], tensors: list[Tensor], before: Seen | None = None) -> Seen:
    """Read the tensors of dicts, key by key, and then others.

    before  what was read of as many, of the same ranks
    Raises an error of Python or torch for what is no dense tensor.
    """
    read = _reader()
    if before is None or read is None:
        every = [*(one[key] for key in keys for one in dicts), *tensors]
    if read is None:
        layouts = [(x.dtype, x.device, x.shape, x.is_contiguous()) for x in every]
        return Seen(array("q", map(Tensor.data_ptr, every)), layouts)
    words = len(before.layouts) if before else sum(1 + x.ndim for x in every)
    found = Seen(array("q", bytes(8 * (len(keys) * len(dicts) + len(tensors)))), array("q", bytes(8 * words)))
    counts = array("q", (len(keys), len(dicts), len(tensors), words))
    try:
        code = read(keys, dicts, tensors, *(x.buffer_info()[0] for x in (counts, *found)))
    except SystemError:  # Python's answer where it is given no dict
        code = -1
    return found if code == 0 else found._replace(layouts=None)


@functools.cache
def _reader() -> Callable[..., int] | None:
    """Return optgen_look for this torch and this Python; None where there is none."""
    (library,) = native.load([native.Job("look", '#include "look.h"\n')])
    if isinstance(library, native.Unavailable):
        return None
    item, address = ctypes.py_object, ctypes.c_void_p
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, item, item, item, item, address, address, address)
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__")  # noqa: B009
    read, none = functools.partial(kind(("optgen_look", library)), exchange), array("q", bytes(32))
    return read if read([], [], [], *[none.buffer_info()[0]] * 3) == 0 else None
