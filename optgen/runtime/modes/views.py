"""Views of weights as users get them, and linear layers that compute with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import sharding
from optgen.runtime.layout.fp8_weight import Fp8Weight
from optgen.runtime.options.entries import Entry
from optgen.runtime.records import Variant
from optgen.runtime.states import state, views
from optgen.runtime.states.views import ViewTensors


def of(one: Any, entry: Entry) -> dict[str, ViewTensors]:
    """Return the views of a parameter by name; they are made where none is fresh.  ValueError where it has none."""
    p, label, owner = entry.p, state.label(entry.p, entry.name), type(one).__name__
    if isinstance(p, Fp8Weight):
        return views.of_weight(p)
    _, plan, variant = checkpoint.select(type(one), entry.group, p, entry.name)
    problem = _problem(p, variant)
    if problem:
        raise ValueError(f"{owner}: {label} has no view: {problem}")
    found = views.kept(p)
    here = sharding.local(p)
    if not all(views.fits(x := found.get(v.name), v, here) and views.is_fresh(x, p) for v in variant.views):
        views.make(plan, variant, p)
    return {view.name: views.shown(p, view.name) for view in variant.views}


def _problem(p: Tensor, variant: Variant) -> str:
    """Return why a parameter has no views, and what to do; "" where it has some."""
    if not variant.views:
        return 'its plan makes none; use one such as my_plan = int8_split24.but(views=("mxfp8_rows",))'
    if not p.requires_grad:
        return "it is frozen, so no step writes one; quantize it once, by torchao's MXTensor.to_mx"
    if found := views.problem(p, variant):
        return found
    for view in variant.views:
        size, along = views.TYPES[view.name][1], "columns" if view.transposed else "rows"
        if view.transposed and p.ndim != 2:
            return f"{view.name} is of matrices, and its shape is {list(p.shape)}; keep it under a plan without"
        if size and (p.ndim < 2 or p.shape[0 if view.transposed else -1] % size):
            return f"of its shape {list(p.shape)} the {along} are no multiple of {size} long; pad the layer"
    return ""


def _read(weight: Tensor, view: str, label: str) -> Tensor:
    """Return the weight as its view has it; RuntimeError where the view is that of another value."""
    if not views.is_fresh(views.kept(weight).get(view), weight):
        raise RuntimeError(
            f"{label} was written to since the view {view} was made of it: after a change of weights between steps "
            f"(a loaded state dict, an edit in place, a new parameter) call use_views(model) again"
        )
    found = views.shown(weight, view).dequantize(weight.dtype)
    return found.t().contiguous() if view == "mxfp8_columns" else found


# An operator, whose gradient is the weight's: torch.compile does not look into it, so compiled forwards check, too.
_OPERATOR = "(Tensor weight, str view, str label) -> Tensor"
_viewed = torch.library.custom_op("optgen::viewed", _read, mutates_args=(), schema=_OPERATOR)
_viewed.register_fake(lambda weight, view, label: weight.new_empty(weight.shape))
_viewed.register_autograd(lambda ctx, grad: (grad, None, None))


class ViewedLinear(nn.Linear):
    """A linear layer that computes with a view of its weight, whose gradient it leaves to the weight.

    shown  the name of the view, and that of the weight in the model
    """

    shown: tuple[str, str]

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, _viewed(self.weight, *self.shown), self.bias)


class ViewHandle:
    """The linear layers that compute with views, until `remove()`; also a context manager."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def remove(self) -> None:
        """Let the layers compute with their weights again."""
        for layer in self.layers:
            layer.__class__ = nn.Linear
        self.layers = []

    def __enter__(self) -> ViewHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use(opt: Any, model: nn.Module, view: str) -> ViewHandle:
    """Let the linear layers of a model compute with a view of their weights, if the optimizer makes one."""
    owner, layers = type(opt).__name__, list[Any]()
    chosen = ((one, e, checkpoint.select(type(one), e.group, e.p, e.name)[2]) for one, e, _ in opt._matched())
    known = {id(entry.p): (one, entry) for one, entry, variant in chosen if variant.views}
    for name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, ViewedLinear) or id(layer.weight) not in known:
            continue
        (one, entry), label = known[id(layer.weight)], f"{name}.weight".removeprefix(".")
        if sharding.is_sharded(entry.p):
            raise ValueError(f"{owner}: a rank has a part of {label}, and layers take all: gather opt.views(p)")
        found = of(one, entry)
        if view not in found:
            raise ValueError(f"{owner}: {label} has no view {view!r}; its plan makes {', '.join(found)}")
        layer.__class__ = ViewedLinear
        layer.shown = view, label
        layers.append(layer)
    if not layers and any(isinstance(entry.p, Fp8Weight) for _, entry, _ in opt._matched()):
        raise ValueError(f"{owner}.use_views: layers read the codes of Fp8Weights already, without views")
    if not layers:
        raise ValueError(
            f"{owner}.use_views: no nn.Linear of this model has a weight of which this optimizer makes a view; its "
            f'plan has to say views=("{view}",), and the model must be the one whose parameters it was given'
        )
    return ViewHandle(layers)
