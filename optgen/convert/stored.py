"""States of any optimizer as numbers in cells, read a chunk at a time: to nearest, what stays in its cell is kept.

They are recognised by dtypes, attributes and keys, as torch.optim, bitsandbytes, torchao and flashoptim keep them.  No
package is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.convert.packages import BNB, GROUP, RUNS
from optgen.runtime.records import dtype_name

GRIDS = {
    torch.float64: (52, -1022), torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14),
}  # fmt: skip
"""Stored bits of the mantissa, and the exponent of the smallest normal number."""

NAMES = {
    "adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "momentum": ("momentum_buffer",),
    "rmsprop": ("square_avg",), "adagrad": ("sum",),
}  # fmt: skip
"""bitsandbytes' name of a rule -> torch's names of its state1 and state2."""


class Cells(NamedTuple):
    """Numbers, and how much less and more the magnitude of a number of the same sign may be to be stored as this one.

    As distances, for float32 has no ends of its own cells.
    """

    value: Tensor
    below: Tensor
    above: Tensor

    def to(self, device: torch.device) -> Cells:
        return Cells(*(part.to(device) for part in self))

    def keep(self, new: Tensor) -> Tensor:
        """Return where new numbers would be stored as those that are there."""
        more = torch.where(self.value < 0, self.value - new, new - self.value)
        return (more >= -self.below) & (more <= self.above)


Read = Callable[[int, int], Cells]
"""(start, stop) -> the elements between, of a flattened tensor."""


class Stored(NamedTuple):
    """A state: its form in words, and the function that reads it; None where it has none here."""

    form: str
    read: Read | None


def local(t: Any) -> Any:
    """Return the part of a sharded tensor that is on this rank; anything else as it is."""
    return getattr(t, "_local_tensor", t)


def flat(t: Any) -> Tensor:
    """Return a tensor as a vector, without a copy if it is contiguous."""
    found: Tensor = local(t).detach().reshape(-1)
    return found


def floats(value: Any) -> Read | None:
    """Read floats in memory; None for other tensors, and for classes that encode them."""
    plain = isinstance(value := local(value), Tensor) and not hasattr(value, "__tensor_flatten__")
    if not plain or value.layout is not torch.strided or value.dtype not in GRIDS or value.is_meta:
        return None
    t, (mantissa, smallest) = flat(value), GRIDS[value.dtype]

    def read(start: int, stop: int) -> Cells:
        x = t[start:stop].to(torch.promote_types(t.dtype, torch.float32))
        fraction, exponent = torch.frexp(x.abs())
        exponent = torch.where(x == 0, smallest + 1, exponent).clamp(min=smallest + 1)
        half = torch.ldexp(torch.ones_like(x), exponent - (mantissa + 2))
        return Cells(x, torch.where((fraction == 0.5) & (exponent > smallest + 1), half / 2, half), half)

    return read


def coded(codes: Tensor, numbers: Tensor, scale: Tensor, run: int, packed: bool = False) -> Read:
    """Read codes by a table and the scale of each run of elements; packed ones are two to a byte, the high one first.

    Ends of cells are the middles between numbers.
    """
    numbers = numbers.detach().float()
    ordered, order = numbers.sort()
    lower, upper = torch.full_like(ordered, math.inf), torch.full_like(ordered, math.inf)
    lower[order[1:]] = upper[order[:-1]] = (ordered[1:] - ordered[:-1]) / 2
    below, above = torch.where(numbers < 0, upper, lower), torch.where(numbers < 0, lower, upper)

    def read(start: int, stop: int) -> Cells:
        if packed:
            some = codes[start // 2 : -(-stop // 2)]
            at = torch.stack([some >> 4, some & 15], -1).flatten()[: stop - start].long()
        else:
            at = codes[start:stop].long()
        unit = scale[torch.arange(start, stop, device=scale.device) // run].float()
        return Cells(numbers[at] * unit, below[at] * unit, above[at] * unit)

    return read


def states(optimizer: Any, p: Tensor) -> dict[str, Stored]:
    """Return the states of a parameter that have a number for each of its elements, under torch's names."""
    entry = optimizer.state.get(p) or {}
    entry = {**entry, **entry.get(BNB, {})}
    names = dict(zip(("state1", "state2"), NAMES.get(getattr(optimizer, "optimizer_name", ""), ()), strict=False))
    scaled = getattr(optimizer, "_scales", {}).get(p, {})  # TransformerEngine's, under a scale of the tensor
    made: dict[str, Stored] = {}
    for key, value in entry.items():
        name, value = str(key), local(value)
        if name not in ("step", "error_bits") and hasattr(value, "numel") and value.numel() == local(p).numel():
            found = Stored("under a scale", None) if name in scaled else _stored(name, value, entry)
            if found.read is not None or name != "master_param":  # bits of a weight's
                made[names.get(name, name)] = found
    return made


def _stored(name: str, value: Any, entry: Mapping[str, Any]) -> Stored:
    value = value if isinstance(value, Tensor) or getattr(value, "_quantized", None) is not None else value._data
    if hasattr(value, "_quantized"):  # flashoptim's class
        return _flashoptim(value._quantized, value._scales)
    if hasattr(value, "codes") and hasattr(value, "qmap"):  # torchao's
        packed = value.qmap.numel() == 16
        read = coded(flat(value.codes), value.qmap, flat(value.scale), value.block_size, packed)
        return Stored(f"{4 if packed else 8}-bit table", read)
    if name[:5] == "state" and f"qmap{name[5:]}" in entry:
        table, largest = (entry[f"{part}{name[5:]}"] for part in ("qmap", "absmax"))
        run = next((run for run in RUNS if largest.numel() == -(-value.numel() // run)), value.numel())
        return Stored("8-bit table", coded(flat(value), table, flat(largest), run))
    plain = floats(value)
    return Stored(type(value).__name__ if plain is None else f"{dtype_name(value.dtype)}, to nearest", plain)


def _flashoptim(codes: Tensor, scale: Tensor) -> Stored:
    scale, every = flat(scale).float(), torch.arange(256, device=codes.device).float()
    if codes.dtype == torch.uint8:  # roots of second moments
        return Stored("8-bit root", coded(flat(codes), (every / 255).square(), scale.square(), GROUP))
    size = torch.where(every > 127, every - 256, every) / 127
    return Stored("8-bit softsign", coded(flat(codes).view(torch.uint8), size / (2 - size.abs()), scale, GROUP))


def size(value: Any) -> int:
    """Return the bytes of a tensor, or of the tensors that a value consists of."""
    value = local(value)
    if hasattr(value, "__tensor_flatten__"):
        return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values()
    return sum(size(part) for part in parts if isinstance(part, Tensor))
