"""`cast_model` and `fp8_weights`: models of 16 bits, and weights of 8, whose optimizers keep their full precision."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.fp8_weight import SHARING, Fp8Weight
from optgen.runtime.states import low_bits as bits
from optgen.runtime.states import state


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    keep: Sequence[str] = (),
    *,
    keep_outputs: Sequence[str] = (),
    low_bits: bool = True,
) -> nn.Module:
    """Cast a model's floating-point parameters and buffers to `dtype`, in place; returns the model.

    keep          fnmatch patterns over the names of modules (with all below them), parameters and buffers, which stay
                  as they are: ["lm_head", "*.router", "*inv_freq"].  A pattern that matches nothing is an error.
    keep_outputs  patterns over the names of kept modules whose outputs stay as they are, too: ["lm_head"] for fp32
                  logits.  Modules of `dtype` do not take these, so it is for the end of a model.
    low_bits      keep what 16-bit weights lose here (2 bytes per trainable parameter) until an optimizer's first step:
                  plans that store more bits of a weight than the model shows then start from the fp32 weights exactly.
                  Other plans drop them.  False for models that are not going to be trained.

    Norms with running statistics (batch norm, and instance norm that tracks them) stay as well: a running average
    moves by less than half a 16-bit ulp and would stand still, and torch computes these layers in mixed precision.
    Layer, group and RMS norms are cast: their kernels want input and weight in one dtype.

    Floating inputs of a kept module are cast to its own dtype, and its floating outputs to `dtype`, so the modules
    around it notice nothing.  A parameter that is kept by its own name, or as a tied one's, gets no such help.

    The Parameter objects stay the same and tied weights stay tied (kept if any of their names is).  Create the
    optimizer afterwards, and shard the model afterwards: TypeError where a DTensor is to be cast.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"cast_model: dtype must be a floating-point dtype, got {dtype!r}")
    if dtype.itemsize == 1:
        raise TypeError(f"cast_model: {dtype} holds no weights without scales: {plans.EIGHT_BITS}")
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_patterns("keep", keep, [*modules, *(name for name, _ in tensors)], "module, parameter or buffer")
    kept_modules = {name for name in modules if name and _matches(name, keep)}
    outermost = {name: modules[name] for name in kept_modules if not _below(name.rpartition(".")[0], kept_modules)}
    _check_patterns("keep_outputs", keep_outputs, [*outermost], "module that is kept and in no other kept one")
    cast = _to_cast(tensors, modules, kept_modules, keep)
    for name, tensor in cast.items():
        _check_plain(name, tensor, dtype)
    for tensor in cast.values():
        _cast(tensor, dtype, low_bits)
    bits.register(model)
    _set_boundaries(modules, outermost, keep_outputs, dtype)
    return model


def fp8_weights(model: nn.Module, keep: Sequence[str] = (), *, kind: Literal["e4m3", "e5m2"] = "e4m3") -> nn.Module:
    """Let the linear layers of a 16-bit model see 8 bits of their weights, in place; returns the model.

    Each trained weight of an nn.Linear becomes an Fp8Weight: a code and 16 more bits of each number, and a power of two
    per 64 neighbours of a row, 3.016 bytes in all.  Layers compute with the codes in the model's dtype, which gradients
    have as well.  For optimizers under a plan of `master=SplitFp8(kind)`; bits that `cast_model` has kept are taken.

    keep  fnmatch patterns over the names of weights that stay as they are, tied ones if any of their names fits:
          ["lm_head.weight"].  A pattern that matches nothing is an error.

    The weights are new Parameters with the gradients and attributes of the old ones, and tied ones stay tied: create
    the optimizer afterwards.  ValueError for a model without such layers, rows that are no multiple of 64 long, weights
    that are computed of others (weight_norm) and parameters with hooks; TypeError for weights that are not of 16 bits.
    """
    made = {id(p): _coded(name, p, kind) for name, p in _of_layers(model, keep).items() if not isinstance(p, Fp8Weight)}
    for module in model.modules():
        for key, old in module._parameters.items():
            module._parameters[key] = made.get(id(old), old)
    return model


def _of_layers(model: nn.Module, keep: Sequence[str]) -> dict[str, nn.Parameter | None]:
    """Return the weights of linear layers that are trained and not kept; None for those that are computed."""
    layers = {f"{name}.weight".removeprefix("."): x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    named = dict(model.named_parameters(remove_duplicate=False))
    _check_patterns("keep", keep, [*named, *(name for name in layers if name not in named)], "weight", "fp8_weights")
    kept = {id(p) for name, p in named.items() if _matches(name, keep)}
    wanted = {name: x._parameters.get("weight") for name, x in layers.items() if not _matches(name, keep)}
    chosen = {name: p for name, p in wanted.items() if p is None or (p.requires_grad and id(p) not in kept)}
    if not chosen:
        raise ValueError("fp8_weights: the model has no nn.Linear with a weight to train, or `keep` has all of them")
    return chosen


def _coded(name: str, p: Any, kind: str) -> nn.Parameter:
    """Return the Parameter in the place of a weight; TypeError or ValueError where layers cannot see 8 bits of it."""
    problem = ""
    if p is None:
        problem = f"of {name!r} are computed of other parameters (weight_norm), which steps would write"
    elif nn.parameter.is_lazy(p):
        problem = f"of {name!r} have no shape yet: make a forward pass with the model first"
    elif p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        problem = f"of {name!r} have hooks, which would be lost: register them afterwards"
    elif p.shape[1] % SHARING:
        problem = f"of {name!r} ({list(p.shape)}) have rows that are no multiple of {SHARING} long: pad the layer"
    if problem:
        raise ValueError(f"fp8_weights: the weights {problem}, or keep=[{name!r}]")
    if p.dtype not in bits.NARROW or sharding.is_sharded(p) or state.wraps(p):
        what = f"{name!r} is a {p.dtype} {type(p).__name__}"
        raise TypeError(f"fp8_weights: {what}: call cast_model(model, torch.bfloat16) first")
    made = nn.Parameter(Fp8Weight.of(_exact(p), p.dtype, kind))
    made.__dict__.update({key: x for key, x in p.__dict__.items() if not key.startswith("_optgen")})
    made.grad = p.grad
    return made


def _exact(p: Tensor) -> Tensor:
    """Return a weight with the bits that a cast has kept of it."""
    found = bits.exact(p)
    return p.detach().float() if found is None else found


def _to_cast(
    tensors: Sequence[tuple[str, Tensor]], modules: Mapping[str, nn.Module], kept_modules: set[str], keep: Sequence[str]
) -> dict[str, Tensor]:
    """Return the floating tensors that are not kept by any of their names, each under its first one."""
    norms = {name for name, module in modules.items() if isinstance(module, _NormBase) and module.track_running_stats}
    kept = {id(t) for name, t in tensors if _matches(name, keep) or _below(name, kept_modules | norms)}
    first = {id(t): name for name, t in reversed(tensors)}
    return {name: t for name, t in tensors if first[id(t)] == name and id(t) not in kept and t.is_floating_point()}


def _check_plain(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError for a tensor that stands for others, and would have to be cast."""
    if tensor.dtype != dtype and (sharding.is_sharded(tensor) or state.wraps(tensor)):
        raise TypeError(
            f"cast_model: {name!r} is a {type(tensor).__name__}, which says its dtype beside the tensors that it "
            f"stands for, and those cannot be cast in place: cast the model before it is sharded or wrapped, or "
            f"use model.to({dtype}), which keeps no low bits"
        )


def _set_boundaries(
    modules: Mapping[str, nn.Module], kept: Mapping[str, nn.Module], keep_outputs: Sequence[str], dtype: torch.dtype
) -> None:
    """Let kept modules cast their inputs, and outputs that are not kept, in place of the hooks of an earlier call."""
    for module in modules.values():
        _remove_boundary(module)
    with_outputs = {module for name, module in kept.items() if _matches(name, keep_outputs)}
    for module in {*kept.values()}:  # once, of all its names
        module.register_forward_pre_hook(_CastInputs(), with_kwargs=True)
        if module not in with_outputs:
            module.register_forward_hook(_CastOutputs(dtype))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _below(name: str, modules: set[str]) -> bool:
    """Return True if a dotted name is one of the modules or inside of one."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in modules for i in range(1, len(parts) + 1))


def _check_patterns(
    argument: str, patterns: Sequence[str], names: Sequence[str], kind: str, caller: str = "cast_model"
) -> None:
    if isinstance(patterns, str):
        raise TypeError(f"{caller}: {argument} must be a list of patterns, got the string {patterns!r}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names if name):
            close = difflib.get_close_matches(pattern, names, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{caller}: {argument} pattern {pattern!r} matches no {kind}{guess}")


def _cast(tensor: Tensor, dtype: torch.dtype, low_bits: bool) -> None:
    """Change the dtype of a tensor object, and of its gradient, in place; `low_bits`: keep what a weight loses."""
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        tensor.grad = None
    if tensor.dtype != dtype:  # else what was kept when it was cast to this dtype is still true
        kept = bits.exact(tensor)
        exact = tensor.data if kept is None else kept
        tensor.data = exact.to(dtype)
        bits.drop(tensor)
        numbers = not nn.parameter.is_lazy(tensor)  # those of lazy modules are drawn in the dtype that they have then
        if low_bits and isinstance(tensor, nn.Parameter) and tensor.requires_grad and numbers and _has_bits(exact):
            bits.keep(tensor, exact)
    if grad is not None:
        tensor.grad = grad.to(dtype)


def _has_bits(exact: Tensor) -> bool:
    """Return True if a weight has low bits that can be kept: fp32 numbers in its own memory."""
    plain = type(exact) is Tensor and exact.layout is torch.strided and not exact.is_meta
    return plain and exact.dtype == torch.float32


class _CastInputs:
    """Forward pre-hook: floating inputs to the dtype of the module's own floating tensors."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        own = (t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
        dtype = next(own, None)
        return _convert(args, dtype), _convert(kwargs, dtype)


class _CastOutputs:
    """Forward hook: floating outputs to the dtype of the model around the kept module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _convert(output, self.dtype)


def _convert(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the same structure of tuples, lists and dicts with floating tensors in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_convert(v, dtype) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_convert(v, dtype) for v in value)
    if isinstance(value, dict):
        return type(value)((k, _convert(v, dtype)) for k, v in value.items())
    return value


def _remove_boundary(module: nn.Module) -> None:
    """Remove the hooks of an earlier call."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, _CastOutputs)]:
        del module._forward_hooks[key]
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, _CastInputs)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
