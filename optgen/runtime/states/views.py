"""The views of parameters: further encodings that the step writes beside the weight (records.View).

They hang on the Parameter, as plain tensors: they are there before its first step, are freed with it, and no state dict
has them.  torch omits them where it deep-copies a Parameter.  Each knows the memory and the version of the weight that
it was made of: whatever else writes to the weight moves one of them.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import layout, sharding
from optgen.runtime.layout.fp8_weight import KINDS, SHARING, Fp8Weight
from optgen.runtime.records import Variant, View
from optgen.runtime.records.join import Pair

ATTRIBUTE = "_optgen_views"
NUMBER = "_optgen_number"
_numbers = itertools.count(secrets.randbits(62))  # of memory: a pickled view meets that of other processes

TYPES: dict[str, tuple[torch.dtype, int, torch.dtype]] = {
    "mxfp8_rows": (torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "mxfp8_columns": (torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "fp8": (torch.float8_e4m3fn, 0, torch.float32),
    "fp8_e5m2": (torch.float8_e5m2, 0, torch.float32),
    "nvfp4": (torch.float4_e2m1fn_x2, 16, torch.float8_e4m3fn),
}
"""Name of a view -> torch's type of codes, neighbours of a row that share a scale (0: all do), type of scales."""


class ViewTensors(NamedTuple):
    """A view in torch's own types (`TYPES`), in the memory that each step writes.

    codes   of the parameter's shape, or transposed ("mxfp8_columns"); of NVFP4 two neighbours of a row are one
    scales  of the neighbours of a row of the codes that share one, or of the tensor
    tensor  of NVFP4, the scale of the tensor, by which those of neighbours are multiplied
    """

    codes: Tensor
    scales: Tensor
    tensor: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as the view has it: code times scale, in the shape of the codes."""
        if self.codes.dtype is torch.float4_e2m1fn_x2:
            pairs = self.codes.view(torch.uint8)
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=pairs.device)
            codes = torch.cat([table, -table])[torch.stack([pairs & 15, pairs >> 4], -1).int()].flatten(-2)
        else:
            codes = self.codes.to(torch.float32)
        scales = self.scales.to(torch.float32) * (1 if self.tensor is None else self.tensor)
        if not scales.ndim:
            return (codes * scales).to(dtype)
        return (codes.view(*scales.shape, -1) * scales.unsqueeze(-1)).view(codes.shape).to(dtype)


Kept = dict[str, Any]
"""The tensors of a view as kernels write them, by name, and what it was made of ("weight", `_value`): plain values,
which a pickled Parameter takes along."""


def kept(p: Tensor) -> dict[str, Kept]:
    """Return the views of a parameter by name; {} where there are none."""
    found: dict[str, Kept] = p.__dict__.get(ATTRIBUTE, {})
    return found


def _value(p: Tensor) -> tuple[int, int, int]:
    """Return what changes with a weight: its version, and the address and a number of its memory, since an address that
    is freed may be the next one given."""
    x = sharding.local(p)
    memory = x.untyped_storage()
    number: int = memory.__dict__.setdefault(NUMBER, next(_numbers))
    return p._version, x.data_ptr(), number


def is_fresh(found: Kept | None, p: Tensor) -> bool:
    """Return True for the view of a weight's present value."""
    return found is not None and found["weight"] == _value(p)


def problem(p: Any, variant: Variant) -> str:
    """Return why ranks cannot make views of their parts of a parameter, and what to do; "" where they can."""
    if sharding.is_sharded(p):
        of = sharding.layout_of(p)
        if any(cut is not None and cut[0] for cut in of.cuts):
            return "it is cut along another dimension than the first (shard it along dimension 0)"
        if any(view.scaled for view in variant.views):
            return "a rank has a part of the tensor that a view's scale is for (mxfp8_rows has none)"
        if p.ndim == 2 and not p.shape[0] % layout.VIEW_ROWS and any(view.transposed for view in variant.views):
            blocks, ends = p.shape[0] // layout.VIEW_ROWS, (end for at in of.coordinates() for end in of.at(at)[0])
            if any(end % layout.VIEW_ROWS for end in ends):
                return f"ranks have parts of blocks of 32 rows (shard it over a number of ranks that divides {blocks})"
    return ""


def fits(found: Kept | None, view: View, x: Tensor) -> bool:
    """Return True if a view has the tensors that kernels write beside a weight."""
    return found is not None and all(
        (t.dtype, tuple(t.shape), t.device) == (f.torch_dtype, layout.field_shape(f, x.shape), x.device)
        for t, f in ((found[f.name], f) for f in view.fields)
    )


def room(p: Tensor, variant: Variant, x: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a parameter's views by their names in the variant; new ones are made where none fit.

    x  the weight as kernels see it: of a DTensor, the rows on this rank
    """
    own, out = dict(kept(p)), dict[str, Tensor]()
    for view in variant.views:
        if not fits(own.get(view.name), view, x):
            shapes = {f.name: (layout.field_shape(f, x.shape), f.torch_dtype) for f in view.fields}
            tensors = {k: torch.zeros(shape, dtype=dtype, device=x.device) for k, (shape, dtype) in shapes.items()}
            own[view.name] = tensors | {"weight": None}
            setattr(p, ATTRIBUTE, own)
        out |= {f.name: own[view.name][f.name] for f in view.fields}
    return out


def stamp(params: Sequence[Tensor]) -> None:
    """Note that the views of these parameters are those of their present values."""
    for p in params:
        for view in kept(p).values():
            view["weight"] = _value(p)


def make(plan: Pair, variant: Variant, p: Tensor) -> None:
    """Make the views of a parameter in eager torch."""
    x = sharding.local(p)
    tensors = room(p, variant, x)
    if any(view.scaled for view in variant.views):
        for name in (view.fields[-1].name for view in variant.views if view.scaled):
            tensors[name].fill_(1)
        layout.write_views(plan, variant, x, tensors)
        rescale(variant, [p])
    layout.write_views(plan, variant, x, tensors)
    stamp([p])


def prepare(plan: Pair, variant: Variant, params: Sequence[Tensor]) -> None:
    """Set the scales of tensors for a step: of what the weights are now."""
    if any(view.scaled for view in variant.views):
        for p in params:
            if not all(is_fresh(kept(p).get(view.name), p) for view in variant.views):
                make(plan, variant, p)
        rescale(variant, params)


def rescale(variant: Variant, params: Sequence[Tensor]) -> None:
    """Set the scales of tensors by the magnitudes that views have found: room for weights to double, 2^-12 of zeros."""
    live = [p for p in params if p.numel()]
    for view in (x for x in variant.views if x.scaled and live):
        found = [kept(p)[view.name] for p in live]
        *_, top, scale = (f.name for f in view.fields)
        tops = torch.stack(torch._foreach_max([x[top].view(torch.uint8) for x in found])).to(torch.int32)
        scales = [x[scale] for x in found]
        new = (torch.stack(scales).view(torch.int32) >> 23) + tops - 127
        new = torch.where(tops == 0, 127 - 12, new.clamp(1, 253)) << 23
        torch._foreach_copy_(scales, list(new.view(torch.float32).unbind()))


def of_weight(p: Fp8Weight) -> dict[str, ViewTensors]:
    """Return what layers see of an Fp8Weight now, as a view: codes, and E8M0 scales of 32 neighbours of a row."""
    scales = p.scale.repeat_interleave(SHARING // 32, -1).view(torch.float8_e8m0fnu)
    return {"mxfp8_rows": ViewTensors(p.codes.clone().view(KINDS[p.kind].dtype), scales)}


def shown(p: Tensor, name: str) -> ViewTensors:
    """Return a view of a parameter in torch's types; of a DTensor, of the rows on this rank."""
    view, (codes, size, scales) = kept(p)[name], TYPES[name]
    found = view[f"{name}_codes"].view(torch.uint8).view(codes)
    shape = found.shape if name == "mxfp8_columns" else sharding.local(p).shape
    if not size:
        return ViewTensors(found, view[f"{name}_tensor"])
    rows, columns = layout.grid(shape)
    of_blocks = view[f"{name}_scale"].view(max(rows, 1), -1).view(torch.uint8)[:rows, : columns // size]
    of_blocks = of_blocks.reshape(*shape[:-1], shape[-1] // size).view(scales)
    return ViewTensors(found.view(*shape[:-1], found.shape[-1]), of_blocks, view.get(f"{name}_tensor"))
