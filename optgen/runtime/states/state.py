"""The state of one parameter: plain tensors under the names of the variant's fields, `step` (int, steps
done) and the host states (floats)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optgen.runtime.layout import layout, sharding
from optgen.runtime.records import Field, Variant, as_float, dtype_name
from optgen.runtime.records.arena import Arena, nbytes
from optgen.runtime.records.join import Pair
from optgen.runtime.states import low_bits

State = dict[str, Any]


def of(states: Mapping[Any, State], p: Tensor) -> State | None:
    """The state of a parameter; None where it has none, or nothing but what its user keeps there."""
    found = states.get(p)
    return found if found and "step" in found else None


def of_parameters(states: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    """The states of an optimizer without what its user keeps among them under other keys."""
    return (entry for key, entry in states.items() if isinstance(key, Tensor))


_HOME = "_optgen_home"


def settle(p: Tensor, device: torch.device | None) -> None:
    """From now on the states of p are on that device; None: on that of p."""
    if device is not None:
        setattr(p, _HOME, device)
    elif hasattr(p, _HOME):
        delattr(p, _HOME)


def home(p: Tensor) -> torch.device:
    """Where the states of p are: with it, unless they were settled elsewhere."""
    found: torch.device = getattr(p, _HOME, p.device)
    return found


def at_home(p: Tensor) -> Tensor:
    """p, or a copy of it where its states are; one of zeros where it has no values."""
    device = home(p)
    if device == p.device:
        return p
    made = torch.zeros_like(p, device=device) if p.is_meta else p.detach().to(device)
    if low_bits.ATTRIBUTE in p.__dict__:
        setattr(made, low_bits.ATTRIBUTE, p.__dict__[low_bits.ATTRIBUTE])
    return made


def overlaps(p: Tensor) -> bool:
    """Whether several elements of p are one, as in expanded views and sliding windows."""
    dims = sorted((stride, size) for size, stride in zip(p.shape, p.stride(), strict=True) if size > 1)
    if p.is_contiguous() or not p.numel():
        return False
    reach = 0  # how far apart elements are that differ in the dimensions before
    for stride, size in dims:
        if stride <= reach:
            return stride == 0 or not _apart(dims)
        reach += stride * (size - 1)
    return False


def _apart(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether all elements of a tensor of these (stride, size) lie at places of their own: counted."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return bool(places.sort().values.diff().all())


def alike(params: Sequence[Tensor]) -> tuple[int, int] | None:
    """The first two of the tensors that have an element in common, by their positions; None where there are none.

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
            if params[i].device == params[j].device and _meet(params[j], params[i]):
                return min(i, j), max(i, j)
        open_spans.append((begin, end, i))
    return None


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common, of which b begins within the span of a: marked in as much memory."""
    if a.is_contiguous():
        return True
    first = a.data_ptr()
    if _beside(a, b, first):
        return False
    marks: list[Tensor] = []
    for t in (a, b):
        start, bytes_ = t.data_ptr() - first, t.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        seen = torch.zeros(start + reach * bytes_, dtype=torch.bool, device="cpu")
        seen.as_strided((*t.shape, bytes_), (*(s * bytes_ for s in t.stride()), 1), start).fill_(True)
        marks.append(seen)
    common = min(len(seen) for seen in marks)
    return bool((marks[0][:common] & marks[1][:common]).any())


def _beside(a: Tensor, b: Tensor, first: int) -> bool:
    """Whether their rows lie beside one another in rows of a common tensor, as column blocks do: told by arithmetic."""
    pitches: set[int] = set()
    taken: list[tuple[int, int]] = []  # of a common row, in bytes
    for t in (a, b):
        dims = [(stride * t.element_size(), size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        if not dims:
            return False
        pitch, _ = max(dims)
        dims.remove(max(dims))
        begin = (t.data_ptr() - first) % pitch if pitch else 0
        pitches.add(pitch)
        taken.append((begin, begin + sum((size - 1) * stride for stride, size in dims) + t.element_size()))
    (_, low_end), (high, high_end) = sorted(taken)
    return len(pitches) == 1 and low_end <= high and high_end <= max(pitches)


def wraps(t: Any) -> bool:
    """Whether a tensor stands for others, whose memory is not its own; DTensors, whose parts are known, aside."""
    return is_traceable_wrapper_subclass(t) and not sharding.is_sharded(t)


def is_fake(t: Tensor) -> bool:
    """Whether a tensor only says how it would lie, on a device that may be the CPU."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and isinstance(t, fake)


def has_memory(t: Tensor, eager: bool) -> bool:
    """Whether kernels may read a tensor at its address; eager torch also takes those that have none by nature."""
    if not t.numel() or t.device.type == "meta":  # of the latter, kernels are refused by name
        return True
    if is_fake(t):
        return eager
    return bool(t.untyped_storage().nbytes()) and bool(t.data_ptr()) and not t._is_zerotensor()


def materialized(t: Tensor) -> Tensor:
    """t, or a copy in memory of the zeros that torch's backward may leave (that of torch.sgn does): they say that
    they have storage, lie nowhere, and are not to be written."""
    return t.clone() if t._is_zerotensor() else t


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def label(p: Tensor, name: str | int, kind: str = "parameter") -> str:
    """How errors call a parameter: its name, or its position over all groups.

    kind   what it is instead: a buffer
    """
    return f"{kind} {name!r} ({describe(p.dtype, tuple(p.shape))})"


def create(
    plan: Pair,
    variant: Variant,
    p: Tensor,
    present: Mapping[str, Any],
    arena: Arena | None = None,
    hypers: Mapping[str, Any] | None = None,
    rounded: list[tuple[Tensor, Tensor]] | None = None,
    step: Any = 0,
) -> State:
    """A state before the first step; what `present` already holds stays as it is.

    Fields of the weight, and of states with a first value of their own, are encoded; the rest is zero.
    Fields on the CPU are laid into the arena, where one is given.
    rounded   gets (p, what p has to hold) where the weight has low bits kept for it; the caller writes it
    step      steps done, where only what a flag asks for from now on is missing
    """
    state: State = dict(present)
    state["step"] = step
    for name, value in variant.host_states:
        state.setdefault(name, value)
    missing = [f for f in variant.fields if f.name not in state]
    made = {f.name: zeros(f, p, arena) for f in missing}
    values = first_values(variant, p, hypers or {})
    encoded = [f.name for f in missing if f.owner == "p" or not _is_zero(values[f.owner])]
    if encoded:
        own = {f.name for f in variant.fields if f.owner == "p"}
        exact = low_bits.exact(p) if rounded is not None and own.isdisjoint(state) else None
        if exact is not None:
            values = first_values(variant, exact, hypers or {})
        if exact is None or rounded is None:
            layout.encode(plan, variant, p, values, encoded, made)
        else:
            rounded.append((p, layout.encode(plan, variant, p, values, [*encoded, "p"], made, exact)["p"]))
    return state | made


def sizes(variant: Variant, p: Tensor, present: Mapping[str, Any]) -> list[int]:
    """Bytes of the fields that `create` will make, in its order; nothing where it needs no room for them."""
    if is_fake(p):
        return []
    fields = [f for f in variant.fields if f.name not in present]
    return [nbytes(layout.field_shape(f, p.shape), f.torch_dtype) for f in fields]


def _is_zero(start: Tensor | float) -> bool:
    return not isinstance(start, Tensor) and start == 0


def first_values(variant: Variant, p: Tensor, hypers: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """What each state holds before the first step: a number, or where the rule says so p or a hyper-parameter."""
    values: dict[str, Tensor | float] = {}
    for name in variant.states:
        start = variant.init.get(name, 0.0)
        if start == "param":
            values[name] = p.detach()
        else:
            values[name] = float(hypers[start]) if isinstance(start, str) else start
    return values


def zeros(field: Field, p: Tensor, arena: Arena | None = None) -> Tensor:
    """The field's tensor in which every entry decodes to 0."""
    shape = layout.field_shape(field, p.shape)
    if arena is not None and home(p).type == "cpu" and not is_fake(p):
        made = arena.zeros(shape, field.torch_dtype)
        return made.fill_(field.zero) if field.zero else made
    return torch.full(shape, field.zero, dtype=field.torch_dtype, device=home(p))


def step_count(value: object) -> int | None:
    """A `step` as an int: ints, whole floats and one-element tensors of them; None for all else."""
    if type(value) is int:
        return value if value >= 0 else None
    number = None if isinstance(value, bool) else as_float(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def problems(variant: Variant, p: Tensor, state: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a state from being one of `variant` for p; nothing where it fits."""
    for f in variant.fields:
        want = describe(f.torch_dtype, layout.field_shape(f, p.shape))
        value = state.get(f.name)
        if not isinstance(value, Tensor):
            yield f"{f.name}: expected {want}, " + ("it is missing" if value is None else f"got {value!r}")
        elif describe(value.dtype, tuple(value.shape)) != want:
            yield f"{f.name}: expected {want}, got {describe(value.dtype, tuple(value.shape))}"
        elif value.device != home(p):
            yield f"{f.name}: expected on {home(p)}, got it on {value.device}"
        elif not value.is_contiguous():
            yield f"{f.name}: expected a contiguous tensor, got strides {value.stride()}"


def check(variant: Variant, p: Tensor, state: Mapping[str, Any], name: str | int) -> None:
    """RuntimeError where the state does not belong to (variant, p)."""
    found = list(problems(variant, p, state))
    if not found:
        return
    where = {str(t.device) for f in variant.fields if isinstance(t := state.get(f.name), Tensor)}
    if where and str(p.device) not in where:
        raise RuntimeError(
            f"{label(p, name)} was moved to {p.device} after its states were made on {', '.join(sorted(where))}: "
            f"opt.load_state_dict(opt.state_dict()) brings them there"
        )
    raise RuntimeError(
        f"the optimizer state of {label(p, name)} does not fit it (was it made under another plan, dtype or "
        f"flag?): {'; '.join(found)}"
    )


INFERENCE = (
    "was made under torch.inference_mode(), outside of which torch does not let it be written: make "
    "the model outside of it"
)


def of_inference(written: Tensor) -> bool:
    """Whether torch must not write this tensor in place: it was made under torch.inference_mode, outside of which it
    writes such a one and then raises an error.

    written   of a DTensor what is written: its part on this rank, or itself
    """
    return written.is_inference() and not torch.is_inference_mode_enabled()


def refuse_inference(
    p: Tensor,
    name: str | int,
    weight: Tensor | None,
    fields: Mapping[str, Any] = MappingProxyType({}),
    kind: str = "parameter",
) -> None:
    """RuntimeError for a tensor that torch is not to write (`of_inference`).

    p, name, kind   how errors call it (`label`)
    weight          what will be written of p, where anything is
    fields          of its state those that will be written, by name
    """
    if weight is not None and of_inference(weight):
        raise RuntimeError(f"{label(p, name, kind)} {INFERENCE}")
    for key, value in fields.items():
        if isinstance(value, Tensor) and of_inference(value):
            raise RuntimeError(
                f"{key} of {label(p, name, kind)} was made under torch.inference_mode(), outside of which torch does "
                f"not let it be written: make the first step outside of it, or every step under it"
            )
