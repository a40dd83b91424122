"""The states of other packages' optimizers, read as the dense fp32 states of torch.optim.

They are recognised by their keys and decoded by the layouts that the packages document. No package is imported.

- bitsandbytes: `state1`, `state2` (codes of the parameter's shape), a table of values per state (`qmap1`) and the
  largest magnitude of each run of 256 or 2048 elements (`absmax1`); small tensors as floats.
- torchao: tensors of its own classes, which know how to become plain ones.
- flashoptim: `<state>::quantized` and `<state>::scales`, runs of 32 elements; `error_bits` of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BNB = "__bnb_optimizer_quant_state__"
"""The key under which recent versions of bitsandbytes nest the parts of a quantized state."""

RUNS = (256, 2048)
"""The elements per `absmax` in bitsandbytes, now and before 0.45."""

GROUP = 32
"""The elements per scale in flashoptim."""

ROOTS = frozenset({"exp_avg_sq"})
"""The states that flashoptim stores as unsigned roots. All others are signed and companded."""


def dense(entry: Mapping[str, Any], states: Sequence[str], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return an entry with its states as fp32 tensors under the names of `states`; other keys stay.

    Raises ValueError for an entry of another package that cannot be read.
    """
    if BNB in entry or "state1" in entry:
        return _bitsandbytes(entry, states, shape)
    if any("::" in str(key) for key in entry) or "error_bits" in entry:
        return _flashoptim(entry, shape)
    return {key: _plain(value) for key, value in entry.items()}


def _plain(value: Any) -> Any:
    """Return a tensor of a quantized class as a plain one."""
    if isinstance(value, Tensor) and hasattr(value, "codes") and hasattr(value, "dequantize"):
        return value.dequantize().to(torch.float32)
    return value


def _bitsandbytes(entry: Mapping[str, Any], states: Sequence[str], shape: tuple[int, ...]) -> dict[str, Any]:
    """Decode the states of an entry."""
    found = {**entry, **entry.get(BNB, {})}
    number = sum(f"state{i}" in found for i in (1, 2))
    if number != len(states):
        raise ValueError(
            f"expected the states {', '.join(states) or '(none)'}, got {number} of a bitsandbytes optimizer: "
            f"it is a checkpoint of another rule"
        )
    made = {name: _by_table(name, i, found, shape) for i, name in enumerate(states, 1)}
    return made | {key: found[key] for key in ("step",) if key in found}


def _by_table(name: str, i: int, found: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Decode the state of number i, `name`, by its table and scales."""
    codes, table, scale = (found.get(f"{key}{i}") for key in ("state", "qmap", "absmax"))
    if isinstance(codes, Tensor) and codes.is_floating_point():
        return codes.to(torch.float32)
    if not (isinstance(codes, Tensor) and isinstance(table, Tensor) and isinstance(scale, Tensor)):
        raise ValueError(f"{name}: expected bitsandbytes' state{i}, qmap{i} and absmax{i}, got only part of them")
    run = next((run for run in RUNS if scale.numel() == -(-codes.numel() // run)), 0)
    if codes.dtype != torch.uint8 or table.numel() != 256 or not run or tuple(codes.shape) != shape:
        raise ValueError(
            f"{name}: expected uint8 {list(shape)}, a table of 256 values and one magnitude for each 256 or 2048 "
            f"elements, got {codes.dtype} {list(codes.shape)}, {table.numel()} and {scale.numel()}"
        )
    return _runs(table.float()[codes.reshape(-1).long()], scale.float(), run).reshape(shape)


def _runs(values: Tensor, scale: Tensor, run: int) -> Tensor:
    """Multiply flat values by the scales of their runs."""
    return values * scale.reshape(-1).repeat_interleave(run)[: values.numel()]


def _flashoptim(entry: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Decode the states of an entry; `error_bits` are left out, since they belong to the weight."""
    made = {str(k): _plain(v) for k, v in entry.items() if "::" not in str(k) and k != "error_bits"}
    for name in dict.fromkeys(str(k).partition("::")[0] for k in entry if "::" in str(k)):
        codes, scale = entry.get(f"{name}::quantized"), entry.get(f"{name}::scales")
        if not isinstance(codes, Tensor) or not isinstance(scale, Tensor) or tuple(codes.shape) != shape:
            raise ValueError(f"{name}: expected flashoptim's {name}::quantized {list(shape)} and {name}::scales")
        if scale.numel() != -(-codes.numel() // GROUP):
            raise ValueError(f"{name}: expected one scale for each {GROUP} elements, got {scale.numel()}")
        # Scales of bf16 parameters are fp16 patterns under the name of bf16, so that torch does not cast them.
        scale = scale.view(torch.float16) if scale.dtype == torch.bfloat16 else scale
        size = codes.reshape(-1).to(torch.float32) / (255 if name in ROOTS else 127)
        if name in ROOTS:
            made[name] = _runs(size, scale.float(), GROUP).square().reshape(shape)
        else:
            made[name] = _runs(size / (2 - size.abs()), scale.float(), GROUP).reshape(shape)
    return made


def weight(entry: Mapping[str, Any], p: Tensor, master_bytes: object) -> Tensor | None:
    """Return the full fp32 weight of p that a flashoptim entry holds, or None if it holds no more than p.

    master_bytes   `master_bytewidth` of its group: 3, or 4 for 16 further bits
    """
    errors = entry.get("error_bits")
    if not isinstance(errors, Tensor) or p.dtype not in (torch.bfloat16, torch.float16):
        return None
    if tuple(errors.shape) != tuple(p.shape):
        raise ValueError(f"error_bits: expected the shape {list(p.shape)}, got {list(errors.shape)}")
    errors = errors.to(p.device)
    # 8-bit codes may be stored as floats, 16-bit codes as bit patterns: torch's loader leaves both forms alone.
    wide = master_bytes == 4
    codes = errors.contiguous().view(torch.int16) if wide else errors
    mantissa, smallest = (7, 1) if p.dtype == torch.bfloat16 else (10, 127 - 14)
    shown = p.detach().to(torch.float32).contiguous()
    exponent = (shown.view(torch.int32) >> 23 & 0xFF).clamp(min=smallest) - (127 + mantissa + 1)  # of half an ulp
    return shown + torch.ldexp(codes.to(torch.float64) / (32767 if wide else 127), exponent).to(torch.float32)
