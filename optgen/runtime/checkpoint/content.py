"""The check of a checkpoint file's content before anything of it is used.

A file whose bytes are as they were written may still hold anything. This checks what all readers count on; whether
states fit their plans is checked when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.records.misfits import Misfits


def problem(content: Mapping[str, Any]) -> str:
    """Return what a checkpoint's content lacks; "" if nothing."""
    about, saved, waiting, model = (content.get(key) for key in ("about", "optimizer", "waiting", "model"))
    if not isinstance(about, dict) or not all(isinstance(about.get(key), str) for key in ("class", "spec")):
        return "expected 'about', with the 'class' and 'spec' of the optimizer"
    if not isinstance(saved, dict):
        return "expected the optimizer's state dict under 'optimizer'"
    misfits = Misfits("optimizer")
    try:
        groups, _ = checkpoint.parts(saved, misfits)
    except ValueError:
        return misfits.lines[0]
    count = sum(len(group["params"]) for group in groups)
    rows, readings = about.get("parameters"), about.get("readings")
    if not isinstance(rows, list) or len(rows) != count or not all(map(_is_row, rows)):
        return f"expected the 'key', 'shape' and 'dtype' of {count} parameters under 'about'"
    if not isinstance(readings, list) or not all(_is_reading(one, count) for one in readings):
        return "expected the first values of states under 'about'"
    if not isinstance(waiting, list) or len(waiting) != count:
        return f"expected low bits of weights, or None, for {count} parameters under 'waiting'"
    for i, (bits, row) in enumerate(zip(waiting, rows, strict=True)):
        if bits is not None and not _is_low_bits(bits, row["shape"]):
            return f"expected low bits of a weight of shape {row['shape']}, or None, under 'waiting' for parameter {i}"
    if not (model is None or (isinstance(model, dict) and all(isinstance(key, str) for key in model))):
        return "expected the model's state dict, or None, under 'model'"
    return next((f"expected {key!r}" for key in ("model", "extra") if key not in content), "")


def _is_row(one: Any) -> bool:
    """Return True for {"key", "shape", "dtype"} of a parameter, of any dtype."""
    if not isinstance(one, dict) or not {"key", "shape", "dtype"} <= one.keys():
        return False
    key, shape, dtype = one["key"], one["shape"], one["dtype"]
    if not (key is None or isinstance(key, str)) or not isinstance(shape, list) or not isinstance(dtype, str):
        return False
    sizes = all(type(size) is int and 0 <= size < 2**63 for size in shape)
    return sizes and isinstance(getattr(torch, dtype, None), torch.dtype)


def _is_reading(one: Any, count: int) -> bool:
    """Return True for [position of a parameter, name of a state, numbers]."""
    if not isinstance(one, (list, tuple)) or [type(x) for x in one] != [int, str, list]:
        return False
    return 0 <= one[0] < count and all(type(value) is float for value in one[2])


def _is_low_bits(bits: Any, shape: list[int]) -> bool:
    """Return True for the dict that `low_bits.keep` makes of a weight of that shape."""
    if not isinstance(bits, dict) or bits.keys() != {"low", "at", "exact", "check"} or type(bits["check"]) is not int:
        return False
    low, at, exact = bits["low"], bits["at"], bits["exact"]
    if not all(isinstance(x, Tensor) and checkpoint.has_values(x) for x in (low, at, exact)):
        return False
    if (low.dtype, list(low.shape)) != (torch.int16, shape) or (at.dtype, exact.dtype) != (torch.int64, torch.float32):
        return False
    return at.ndim == 1 and at.shape == exact.shape and bool(((at >= 0) & (at < low.numel())).all())
