"""The views of parameters: further encodings that the step writes beside the weight (records.View).

They hang on the Parameter, as plain tensors: they are there before its first step, are freed with it, and no state dict
has them.  torch omits them where it deep-copies a Parameter.  Each knows the version of the weight that it was made of:
whatever else writes to the weight moves that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optgen.runtime.layout import layout
from optgen.runtime.records import Variant, View
from optgen.runtime.records.join import Pair

ATTRIBUTE = "_optgen_views"
NEVER = -1


class ViewTensors(NamedTuple):
    """A view in torch's own types, in the memory that each step writes: codes of the parameter's shape, float8_e4m3fn,
    and the scales of 32 neighbours of a row, float8_e8m0fnu."""

    codes: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as the view has it: code times scale."""
        codes = self.codes.to(torch.float32).view(*self.scales.shape, -1)
        return (codes * self.scales.to(torch.float32).unsqueeze(-1)).view(self.codes.shape).to(dtype)


Kept = dict[str, Any]
"""The tensors of a view as kernels write them, "codes" and "scales", and the "version" and "address" of the weight that
it was made of: plain values, which a pickled Parameter takes along."""


def kept(p: Tensor) -> dict[str, Kept]:
    """Return the views of a parameter by name; {} where there are none."""
    found: dict[str, Kept] = p.__dict__.get(ATTRIBUTE, {})
    return found


def is_fresh(found: Kept | None, p: Tensor) -> bool:
    """Return True for the view of a weight's present value."""
    return found is not None and found["version"] == p._version and found["address"] == p.data_ptr()


def fits(found: Kept | None, view: View, p: Tensor) -> bool:
    """Return True if a view has the tensors that kernels write."""
    return found is not None and all(
        (t.dtype, tuple(t.shape), t.device) == (f.torch_dtype, layout.field_shape(f, p.shape), p.device)
        for t, f in zip((found["codes"], found["scales"]), view.fields, strict=True)
    )


def room(p: Tensor, variant: Variant) -> dict[str, Tensor]:
    """Return the tensors of a parameter's views by their names in the variant; new ones are made where none fit."""
    own, out = dict(kept(p)), dict[str, Tensor]()
    for view in variant.views:
        if not fits(own.get(view.name), view, p):
            codes, scales = (
                torch.zeros(layout.field_shape(f, p.shape), dtype=f.torch_dtype, device=p.device) for f in view.fields
            )
            own[view.name] = {"codes": codes, "scales": scales, "version": NEVER, "address": 0}
            setattr(p, ATTRIBUTE, own)
        found = own[view.name]
        out |= zip((f.name for f in view.fields), (found["codes"], found["scales"]), strict=True)
    return out


def stamp(params: Sequence[Tensor]) -> None:
    """Note that the views of these parameters are those of their present values."""
    for p in params:
        for view in kept(p).values():
            view["version"], view["address"] = p._version, p.data_ptr()


def make(plan: Pair, variant: Variant, p: Tensor) -> None:
    """Make the views of a parameter in eager torch."""
    layout.write_views(plan, variant, p, room(p, variant))
    stamp([p])


def shown(p: Tensor, name: str) -> ViewTensors:
    """Return a view of a parameter in torch's types."""
    view, (rows, columns) = kept(p)[name], layout.grid(p.shape)
    scales = view["scales"].view(torch.uint8).view(rows, -1)[:, : columns // 32]
    scales = scales.reshape(*p.shape[:-1], p.shape[-1] // 32)
    return ViewTensors(view["codes"].view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))
