"""The state of one parameter: a tensor for each field of the variant, `step` (an int) and host states (floats)."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optgen.runtime.layout import layout, sharding
from optgen.runtime.layout.fp8_weight import exact, kept_with
from optgen.runtime.layout.sharded_states import ShardedStates
from optgen.runtime.records import Field, Variant, as_float, dtype_name, fed_name, huge_pages
from optgen.runtime.records.join import Pair
from optgen.runtime.states import low_bits

State = dict[str, Any]


class States(defaultdict[Any, State]):
    """The states by parameter, and entries of the user; false without a state of a step.

    torch.distributed.checkpoint asks that before it makes states: reading one, or an entry of the user, made none.
    """

    def __bool__(self) -> bool:
        return any("step" in entry for entry in of_parameters(self))


def of(states: Mapping[Any, State], p: Tensor) -> State | None:
    """Return the state of a parameter; None if it has none, or only entries of the user."""
    found = states.get(p)
    return found if found and "step" in found else None


def of_parameters(states: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the states of parameters, without entries of the user under other keys."""
    return (entry for key, entry in states.items() if isinstance(key, Tensor))


TRAINED = "trained_weight"
"""The entry, in evaluation, of the weight that `train()` puts back into the model."""


def trained(p: Tensor, kept: Mapping[str, Any]) -> Tensor:
    """Return the weight of training of a parameter in evaluation, which its states belong to."""
    made: Tensor = kept[TRAINED].detach()
    settle(made, home(p))
    return made


_HOME = "_optgen_home"


def settle(p: Tensor, device: torch.device | None) -> None:
    """Put the states of p, from now on, on a device; None stands for that of p."""
    if device is not None:
        setattr(p, _HOME, device)
    elif hasattr(p, _HOME):
        delattr(p, _HOME)


def home(p: Tensor) -> torch.device:
    """Return the device of the states of p: that of p, unless they were settled elsewhere."""
    found: torch.device = getattr(p, _HOME, p.device)
    return found


def at_home(p: Tensor) -> Tensor:
    """Return p, or a copy of it on the device of its states, of zeros if p is on the meta device."""
    device = home(p)
    if device == p.device:
        return p
    made = torch.zeros_like(p, device=device) if p.is_meta else p.detach().to(device)
    if low_bits.ATTRIBUTE in p.__dict__:
        setattr(made, low_bits.ATTRIBUTE, p.__dict__[low_bits.ATTRIBUTE])
    return made


def overlaps(p: Tensor) -> bool:
    """Return True if elements of p share memory, as in expanded views and sliding windows, or if strides that cross
    one another do not tell."""
    if p.is_contiguous() or not p.numel():
        return False
    reach = 0  # how far apart elements are that differ in the dimensions before
    for stride, size in sorted((s, n) for n, s in zip(p.shape, p.stride(), strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def alike(params: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of the first two tensors that share an element, or whose elements alternate; None if there
    are none.

    Tensors without memory of their own (on meta, empty, freed by what shards them, those of other classes) have none.
    """
    spans: list[tuple[int, int, int]] = []
    for i, p in enumerate(params):
        if type(p) not in (Tensor, torch.nn.Parameter) or p.device.type == "meta" or not p.numel():
            continue
        begin = p.data_ptr()
        if begin:
            reach = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((begin, begin + (reach + 1) * p.element_size(), i))
    spans.sort()
    open_spans: list[tuple[int, int, int]] = []
    for begin, end, i in spans:
        open_spans = [span for span in open_spans if span[1] > begin]
        for _, _, j in open_spans:
            if params[i].device == params[j].device:
                return min(i, j), max(i, j)
        open_spans.append((begin, end, i))
    return None


def wraps(t: Any) -> bool:
    """Return True for tensor subclasses without storage of their own, except DTensor."""
    return is_traceable_wrapper_subclass(t) and not sharding.is_sharded(t)


def is_fake(t: Tensor) -> bool:
    """Return True for fake tensors, which may claim any device."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and isinstance(t, fake)


def has_memory(t: Tensor, eager: bool) -> bool:
    """Return True if kernels may read a tensor at its address; eager torch also reads fake tensors."""
    if not t.numel() or t.device.type == "meta":  # of the latter, kernels are refused by name
        return True
    if is_fake(t):
        return eager
    return bool(t.untyped_storage().nbytes()) and bool(t.data_ptr()) and not t._is_zerotensor()


def materialized(t: Tensor) -> Tensor:
    """Return t, or a copy of a zero without memory, as torch's backward may leave (torch.sgn's does)."""
    return t.clone() if t._is_zerotensor() else t


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def kind(value: Any) -> str:
    """Return the dtype and shape of a tensor, or the type of another value, for an error message."""
    return describe(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def label(p: Tensor, name: str | int, kind: str = "parameter") -> str:
    """Return the description of a parameter in errors.

    name   its name, or its position over all groups
    kind   "buffer" for a buffer
    """
    return f"{kind} {name!r} ({describe(p.dtype, tuple(p.shape))})"


def create(
    plan: Pair,
    variant: Variant,
    p: Tensor,
    present: Mapping[str, Any],
    hypers: Mapping[str, Any] | None = None,
    rounded: list[tuple[Tensor, Tensor]] | None = None,
    step: Any = 0,
    parts: ShardedStates | None = None,
) -> State:
    """Return a state before the first step; entries of `present` stay as they are.

    Fields of the weight, and of states with a first value of their own, are encoded; the rest is zero.

    rounded   gets (p, its new value) if the weight has low bits; the caller writes it
    step      the steps done, if only states that a flag needs from now on are missing
    parts     of the DTensor that p is a part of
    """
    state: State = kept_with(p, {**present, "step": step})
    for name, value in variant.host_states:
        state.setdefault(name, value)
    missing = [f for f in variant.fields if f.name not in state]
    made = {f.name: zeros(f, p, parts) for f in missing}
    values = first_values(variant, p, hypers or {})
    _start_matrices(variant, p, missing, made, values, parts)
    encoded = [f.name for f in missing if _is_encoded(variant, f, values)]
    begins = bool(encoded) and state.keys().isdisjoint(variant.owned("p"))
    exact = low_bits.exact(p) if rounded is not None and begins else None
    if exact is not None and rounded is not None:
        values = first_values(variant, exact, hypers or {})
        rounded.append((p, layout.encode(plan, variant, p, values, [*encoded, "p"], made, exact)["p"]))
    elif encoded:
        layout.encode(plan, variant, p, values, encoded, made)
    return state | made


def _is_encoded(variant: Variant, field: Field, values: Mapping[str, Tensor | float]) -> bool:
    """Return True for a field, not of a matrix state, that does not begin with zeros."""
    if field.owner == "p" or field.owner in variant.eager.matrices:
        return field.owner == "p"
    value = values[field.owner]
    return isinstance(value, Tensor) or value != 0


def _start_matrices(
    variant: Variant, p: Tensor, missing: Sequence[Field], made: Mapping[str, Tensor],
    values: Mapping[str, Tensor | float], parts: ShardedStates | None,
) -> None:  # fmt: skip
    """Write the first values of matrix states that are encoded, and the identity into those that are not."""
    coded, shape = variant.eager.matrices, p.shape if parts is None else parts.layout.shape
    identity = {x for x, start in variant.init.items() if start == "identity"}
    starts = {x: "identity" if x in identity else values[x] for x in coded}
    whole: dict[str, Tensor] = {}
    for name in {f.owner for f in missing} & variant.init.keys() & coded.keys():
        whole |= layout.matrix_fields(variant, name, starts, shape, home(p))
    for f in missing:
        of = None if parts is None else parts.field(f)
        if f.name in whole:
            made[f.name].copy_(whole[f.name] if of is None else sharding.part_of(whole[f.name], of))
        elif f.owner in identity:
            here = None if of is None else of.here
            made[f.name].diagonal(here[-2][0] if here else 0, dim1=-2, dim2=-1).fill_(1)


def shape(field: Field, p: Tensor, parts: ShardedStates | None) -> tuple[int, ...]:
    """Return the shape of a field's tensor on this rank."""
    return layout.field_shape(field, p.shape) if parts is None else parts.shape(field, p)


def first_values(variant: Variant, p: Tensor, hypers: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """Return each state before the first step: a number, or p if the rule says so; of the identity matrix, 0."""
    values: dict[str, Tensor | float] = {}
    for name in variant.states:
        start = variant.init.get(name, 0.0)
        if start == "param":
            values[name] = exact(p.detach())
        elif start == "identity":
            values[name] = 0.0
        else:
            values[name] = float(hypers[start]) if isinstance(start, str) else start
    return values


def zeros(field: Field, p: Tensor, parts: ShardedStates | None = None) -> Tensor:
    """Return the field's tensor in which every entry decodes to 0."""
    size = shape(field, p, parts)
    if home(p).type == "cpu" and not is_fake(p):
        made = huge_pages.zeros(size, field.torch_dtype)
        return made.fill_(field.zero) if field.zero else made
    return torch.full(size, field.zero, dtype=field.torch_dtype, device=home(p))


STEPS = 2**53
"""More steps are never made; beyond it fp64, in which their scalars are computed, does not count by ones."""


def step_count(value: object) -> int | None:
    """Return a `step` as an int, from an int, a whole float or a one-element tensor; None for anything else."""
    number = None if isinstance(value, bool) else value if type(value) is int else as_float(value)
    return int(number) if number is not None and 0 <= number < STEPS and number == int(number) else None


def problems(
    variant: Variant, p: Tensor, state: Mapping[str, Any], parts: ShardedStates | None = None
) -> Iterator[str]:
    """Yield the reasons why a state is not one of `variant` for p; nothing if it fits."""
    for f in variant.fields:
        want = describe(f.torch_dtype, shape(f, p, parts))
        value = state.get(f.name)
        if not isinstance(value, Tensor):
            yield f"{f.name}: expected {want}, " + ("it is missing" if value is None else f"got {value!r}")
        elif describe(value.dtype, tuple(value.shape)) != want:
            yield f"{f.name}: expected {want}, got {describe(value.dtype, tuple(value.shape))}"
        elif value.device != home(p):
            yield f"{f.name}: expected on {home(p)}, got it on {value.device}"
        elif not value.is_contiguous() and (any(value.stride()) or state.get(fed_name(f.name)) != 0.0):
            yield f"{f.name}: expected a contiguous tensor, got strides {value.stride()}"


def check(
    variant: Variant, p: Tensor, state: Mapping[str, Any], name: str | int, parts: ShardedStates | None = None
) -> None:
    """Raise RuntimeError if the state does not fit the variant and p."""
    found = list(problems(variant, p, state, parts))
    if not found:
        return
    where = {str(t.device) for f in variant.fields if isinstance(t := state.get(f.name), Tensor)}
    if where and str(p.device) not in where:
        raise RuntimeError(
            f"{label(p, name)} was moved to {p.device} after its states were made on {', '.join(sorted(where))}: "
            f"opt.load_state_dict(opt.state_dict()) brings them there"
        )
    raise RuntimeError(
        f"the optimizer state of {label(p, name)} does not fit it (was it made under another plan, dtype, "
        f"flag or rank, or loaded by torch.optim.Optimizer.load_state_dict, which casts it? The optimizer's own "
        f"load_state_dict(saved) reads it as it was saved): {'; '.join(found)}"
    )
