"""What stands in a checkpoint file, looked at before anything of it is used.

Bytes may be as they were written and still be no checkpoint: of another program, or of a run in which something put
other values into the optimizer's dicts.  Here is what all readers count on; whether states fit their plans is a
question of loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.records.misfits import Misfits


def problem(content: Mapping[str, Any]) -> str:
    """What a checkpoint file lacks; "" where nothing."""
    about, saved, waiting = (content.get(key) for key in ("about", "optimizer", "waiting"))
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
    rows = about.get("parameters")
    if not isinstance(rows, list) or len(rows) != count or not all(map(_is_row, rows)):
        return f"expected the 'key', 'shape' and 'dtype' of {count} parameters under 'about'"
    readings = about.get("readings")
    if not isinstance(readings, list) or not all(_is_reading(one, count) for one in readings):
        return "expected the first values of states under 'about'"
    if not isinstance(waiting, list) or len(waiting) != count:
        return f"expected low bits of weights, or None, for {count} parameters under 'waiting'"
    for i, (bits, row) in enumerate(zip(waiting, rows, strict=True)):
        if bits is not None and not _is_low_bits(bits, row["shape"]):
            return f"expected low bits of a weight of shape {row['shape']}, or None, under 'waiting' for parameter {i}"
    model = content.get("model")
    if not (model is None or (isinstance(model, dict) and all(isinstance(key, str) for key in model))):
        return "expected the model's state dict, or None, under 'model'"
    return next((f"expected {key!r}" for key in ("model", "extra") if key not in content), "")


def _is_row(one: Any) -> bool:
    """Whether it says what a parameter is, be it one that was never trained, of integers."""
    if not isinstance(one, dict) or not {"key", "shape", "dtype"} <= one.keys():
        return False
    shape, dtype = one["shape"], one["dtype"]
    return (
        (one["key"] is None or isinstance(one["key"], str))
        and isinstance(shape, list)
        and all(type(size) is int and 0 <= size < 2**63 for size in shape)
        and isinstance(dtype, str)
        and isinstance(getattr(torch, dtype, None), torch.dtype)
    )


def _is_reading(one: Any, count: int) -> bool:
    """Whether it is [position of a parameter, name of a state, numbers]."""
    return (
        isinstance(one, Sequence)
        and len(one) == 3
        and type(one[0]) is int
        and 0 <= one[0] < count
        and isinstance(one[1], str)
        and isinstance(one[2], list)
        and all(type(value) is float for value in one[2])
    )


def _is_low_bits(bits: Any, shape: list[int]) -> bool:
    """Whether it is what `low_bits.keep` hangs on a weight of that shape."""
    if not isinstance(bits, dict) or bits.keys() != {"low", "at", "exact", "check"} or type(bits["check"]) is not int:
        return False
    low, at, exact = bits["low"], bits["at"], bits["exact"]
    if not all(isinstance(x, Tensor) and checkpoint.has_values(x) for x in (low, at, exact)):
        return False
    if (low.dtype, list(low.shape)) != (torch.int16, shape) or (at.dtype, exact.dtype) != (torch.int64, torch.float32):
        return False
    return at.ndim == 1 and at.shape == exact.shape and bool(((at >= 0) & (at < low.numel())).all())
