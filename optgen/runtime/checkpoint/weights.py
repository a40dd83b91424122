"""The full weights of a model whose parameters show only part of their bits: read as fp32, and set.

Names are those of the model's state dict (tied weights have several). Parameters are found in it by identity, so that
wrappers and hooks that prefix names change nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import layout, sharded_states, sharding
from optgen.runtime.layout.fp8_weight import Fp8Weight, exact, kept_without
from optgen.runtime.options.entries import Entry
from optgen.runtime.options.options import MODE, hypers_of
from optgen.runtime.records import Variant
from optgen.runtime.records.join import Pair
from optgen.runtime.records.problems import Problems
from optgen.runtime.states import low_bits, state


def settle(rounded: Iterable[tuple[Tensor, Tensor]], params: Iterable[Tensor]) -> None:
    """Write the weights that belong to new states, and drop the low bits that these took."""
    for p, value in rounded:
        p.copy_(value)
    for p in params:
        low_bits.drop(p)


def fresh(t: Tensor) -> Tensor:
    """Return a copy of a weight before its first step: fp32 and contiguous, or as it is if fp32 does not hold it."""
    found = low_bits.exact(t)
    if found is not None or isinstance(t, Fp8Weight):
        return exact(t) if found is None else found
    held = t.is_floating_point() and t.dtype.itemsize <= 4
    made = t.detach().to(torch.float32 if held else t.dtype, copy=True)
    return made.contiguous() if made.layout is torch.strided else made


def edited(p: Tensor, weight: Tensor) -> bool:
    """Return True if p is more than one last place from the full weight: no rounding is."""
    if p.dtype not in low_bits.NARROW or isinstance(p, Fp8Weight):
        return False
    near, shown = weight.to(p.dtype), p.detach().contiguous()
    off = (_ordered(near) - _ordered(shown)).abs() > 1
    return bool((off & ~(near.isnan() & shown.isnan())).any())


def _ordered(t: Tensor) -> Tensor:
    """Return 16-bit floats as integers in the order of their values, of which neighbours differ by 1."""
    pattern = t.view(torch.int16).to(torch.int32)
    return torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)


def of_entry(one: Any, entry: Entry) -> Tensor:
    """Return the full weight of a parameter as it is to be used: in evaluation, as it is evaluated with.

    RuntimeError if p is not the weight of its state.
    """
    p: Any = entry.p
    if not state.of(one.state, p):
        return fresh(p)
    plan, variant, kept = _kept(one, entry)
    if state.TRAINED in kept:
        made = evaluated(type(one), entry.group, state.trained(p, kept), kept, entry.name).to(p.device)
        return sharding.wrapped(made, sharding.layout_of(p)) if sharding.is_sharded(p) else made
    weight = sharded_states.decode(plan, variant, p, kept, ("p",))["p"]
    if edited(sharding.local(p), sharding.local(weight)):
        raise RuntimeError(
            f"{state.label(p, entry.name)} was changed by something else than the optimizer, and is no rounding of the "
            f"full weight that the optimizer keeps. To go on from what the model shows: "
            f"opt.load_master_state_dict(model, model.state_dict())"
        )
    return weight


def _kept(one: Any, entry: Entry) -> tuple[Pair, Variant, Mapping[str, Any]]:
    """Return the plan, the variant and the state of a parameter; RuntimeError if the state does not fit."""
    kept = state.of(one.state, entry.p) or {}
    _, plan, variant = checkpoint.select(type(one), entry.group, entry.p, entry.name)
    if kept and state.TRAINED not in kept:
        state.check(variant, entry.p, kept, entry.name)
    return plan, variant, kept


def _trained(optimizer: Any, model: nn.Module) -> dict[int, tuple[Any, Entry]]:
    """Return (optimizer of one rule, entry) of those that are trained, by id(parameter).

    Raises ValueError for a model none of whose parameters is in the optimizer.
    """
    found = [(one, entry) for one, entry, _ in optimizer._matched()]
    params, known = list(model.parameters()), {id(entry.p) for _, entry in found}
    if params and not any(id(p) in known for p in params):
        raise ValueError(
            f"{type(optimizer).__name__}: none of the model's {len(params)} parameters is in this optimizer: it was "
            f"made for another model, or the model's parameters were replaced since (wrapped, sharded, copied); make "
            f"the optimizer from the model as it is now"
        )
    return {id(e.p): (one, e) for one, e in found if e.p.requires_grad or state.of(one.state, e.p)}


@torch.no_grad()
def of_model(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict with its weights as fp32: `Optimizer.master_state_dict`."""
    weights = {key: partial(of_entry, *one) for key, one in _trained(optimizer, model).items()}
    found = model.state_dict(keep_vars=True)
    made: dict[int, Any] = {}
    for key, value in ((id(value), value) for value in found.values()):
        if key not in made:
            made[key] = weights[key]() if key in weights else fresh(value) if isinstance(value, Tensor) else value
    return {name: made[id(value)] for name, value in found.items()}


Owned = list[tuple[Tensor, Tensor]]
"""Parameters of an optimizer, each with its new value."""


def check(
    model: nn.Module, owner: str, saved: Any, owned: Mapping[int, object], strict: bool
) -> tuple[Owned, dict[str, Any]]:
    """Compare a state dict with the model; return what is the optimizer's in it, and the other entries by name.

    Raises ValueError listing all misfits.
    """
    misfits = Problems(f"{owner}.load_master_state_dict: the weights do not fit the model, nothing was loaded")
    if not isinstance(saved, Mapping):
        raise TypeError(f"{owner}.load_master_state_dict takes a state dict, got {saved!r:.80}")
    live = model.state_dict(keep_vars=True)
    if strict:
        compare_names(live, saved, misfits)
    mine, rest, first = Owned(), dict[str, Any](), dict[int, str]()
    for name in (n for n in live if n in saved):
        target, value = live[name], saved[name]
        other = first.get(id(target), name)
        if isinstance(target, Tensor):
            if line := _problem(target, value, id(target) in owned):
                misfits.add(f"{name}: {line}")
                continue
            first.setdefault(id(target), name)
        if other != name:
            if not _same(saved[other], value):
                misfits.add(f"{name}: it is tied to {other}, but the two differ")
        elif id(target) in owned:
            mine.append((target, value))
        else:
            rest[name] = _laid_out(value, target)
    misfits.stop()
    return mine, rest


def compare_names(live: Mapping[str, Any], saved: Mapping[str, Any], misfits: Problems, prefix: str = "") -> None:
    """Add a misfit for every name that a model and a state dict do not share."""
    for name in (n for n in live if n not in saved):
        misfits.add(f"{prefix}{name}: expected {state.kind(live[name])}, it is missing")
    for name in (n for n in saved if n not in live):
        misfits.add(f"{prefix}{name}: not expected, the model has none of that name")


def _laid_out(value: Any, target: Any) -> Any:
    """Return a value as a DTensor where the model has one."""
    if not sharding.is_sharded(target) or sharding.is_sharded(value):
        return value
    of = sharding.layout_of(target)
    return sharding.wrapped(sharding.part_of(value, of).to(target.device), of)


def _problem(target: Tensor, value: Any, trained: bool) -> str:
    """Describe a value that does not fit a tensor of the model, or a weight that cannot be written; "" if it fits."""
    if line := _misfit(target, value):
        return f"expected {state.kind(target)}, got {line}"
    without = checkpoint.without_values(sharding.local(target)) if trained else ""
    return without and f"the model's is one {without}, which cannot be written"


def _misfit(target: Tensor, value: Any) -> str:
    """Describe a value that does not fit or that torch cannot read; "" if it fits. Floating dtypes fit one another."""
    if not isinstance(value, Tensor):
        return f"{value!r:.80}"
    if value.shape != target.shape or value.is_floating_point() is not target.is_floating_point():
        return state.kind(value)
    if value.layout is not target.layout:
        return f"one of layout {value.layout}"
    mesh, own = (getattr(t, "device_mesh", None) for t in (value, target))
    if mesh is not None and mesh != own:
        return f"a DTensor over {'another mesh, ' if own is not None else ''}{mesh}; full_tensor() makes it whole"
    if value.layout is torch.strided and not (value.is_meta and target.is_meta):
        without = checkpoint.without_values(sharding.local(value))
        return without and f"one {without}"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(_pattern(a), _pattern(b.to(a.device))))


def _pattern(t: Tensor) -> Tensor:
    """Return the bytes of a tensor, in which NaN equals itself."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.detach()


def put(one: Any, entry: Entry, value: Tensor) -> None:
    """Set a weight and the part of it that its state keeps; of a DTensor, the part on this rank.

    A DTensor without a state gets one: it has no other place for its low bits.
    """
    if isinstance(entry.p, Fp8Weight):
        entry.p.copy_(value)
        return
    p, (plan, variant, kept) = entry.p, _kept(one, entry)
    parts = sharded_states.ShardedStates.of(p, variant) if sharding.is_sharded(p) else None
    weight, full = (p, value.detach()) if parts is None else (parts.weight(p), parts.beside("its weight", value))
    full = full.to(device=p.device, dtype=torch.float32).contiguous()
    own = [f.name for f in variant.fields if f.owner == "p"]
    if kept and own:
        new = layout.encode(plan, variant, weight, dict.fromkeys(variant.states, 0.0), [*own, "p"], None, full)
        weight.copy_(new["p"])
        for name in own:
            sharding.local(kept[name]).copy_(new[name])
    else:
        weight.copy_(full)
        low_bits.drop(weight)
        # A state may hold more of a weight than a 16-bit parameter shows.
        if not kept and (own or "param" in variant.init.values()):
            low_bits.keep(weight, full)
            if parts is not None:
                rounded: list[tuple[Tensor, Tensor]] = []
                new = state.create(plan, variant, weight, {}, entry.group, rounded, 0, parts)
                one.state[p] = {**one.state.get(p, {}), **parts.wrapped(new)}
                settle(rounded, [weight])
    if parts is not None and parts.gathered:
        sharding.local(p).copy_(sharding.part_of(weight, parts.layout))


@torch.no_grad()
def load(optimizer: Any, model: nn.Module, saved: Any, strict: bool) -> None:
    """Set a model's weights, and the bits of them that an optimizer keeps: `Optimizer.load_master_state_dict`."""
    entries = _trained(optimizer, model)
    owned, rest = check(model, type(optimizer).__name__, saved, entries, strict)
    for p, _ in owned:
        _kept(*entries[id(p)])
    if rest:
        model.load_state_dict(rest, strict=False)
    for p, value in owned:
        put(*entries[id(p)], value)
    low_bits.register(model)


WEIGHTS_ONLY = "weights_only"
"""The key of a state dict that has nothing of states but the bits of weights."""


def without_states(optimizer: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the bits of weights alone; RuntimeError in evaluation, and where the bits of a cast wait
    for a first step."""
    made = {}
    for one, entry, whole in optimizer._matched():
        if one._evaluating:
            one._refuse_unready("state_dict(weights_only=True)")
        if kept := found["state"].get(whole.position):
            made[whole.position] = {name: kept[name] for name in _kept(one, entry)[1].owned("p") if name in kept}
        elif low_bits.exact(entry.p) is not None:
            raise RuntimeError(
                f"{type(one).__name__}.state_dict(weights_only=True): the bits that cast_model kept of "
                f"{state.label(entry.p, entry.name)} wait for a first step: make one, or take master_state_dict(model)"
            )
    return {**found, "state": made, WEIGHTS_ONLY: True}


def with_states(one: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of weights alone with the states and options that an optimizer of one rule has itself."""
    misfits = Problems(f"{type(one).__name__}.load_state_dict: the weights do not fit, nothing was loaded")
    groups, found = checkpoint.parts(saved, misfits)
    numbers, states = checkpoint.match(one.param_groups, groups, misfits).order, dict[Any, Any]()
    for entry in one._entries():
        p, (plan, variant, kept), number = entry.p, _kept(one, entry), numbers[id(entry.p)]
        if not kept and number not in found:
            continue
        rest = {name: x for name, x in kept.items() if name not in variant.owned("p")}
        # There are no bits of a weight that has made no step where they are from: it is what the model shows.
        parts = sharded_states.ShardedStates.of(p, variant) if sharding.is_sharded(p) else None
        weight, step = p if parts is None else parts.weight(p), rest.get("step", 0)
        made = state.create(plan, variant, weight, rest, entry.group, None, step, parts)
        made = kept_without(made) if isinstance(p, Fp8Weight) else made
        known = {*rest, *(variant.owned("p") if number in found else ())}
        new = {name: x for name, x in made.items() if name not in known}
        states[number] = {**rest, **(new if parts is None else parts.wrapped(new)), **found.get(number, {})}
    own_groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in one.param_groups]
    return {"state": states, "param_groups": own_groups}


@torch.no_grad()
def scale_rows(optimizer: Any, p: Tensor, factors: Any) -> None:
    """Multiply the rows of a weight, and the bits of them that this optimizer keeps; moments stay as they are.

    p        one of its parameters
    factors  numbers, one for each row (index of dimension 0), or for each block of as many rows, such as a head

    QK-clip scales queries and keys so (Kimi K2, arXiv:2507.20534).  A product is rounded to fp32 and then, to nearest,
    to what the plan keeps of a weight.
    ValueError for another parameter, for factors of another number or that are not finite, and for a rule that keeps
    other weights beside p; RuntimeError as of `full_weights`.  Nothing has changed then.
    """
    optimizer._refuse_unready("scale_rows()")
    owner = f"{type(optimizer).__name__}.scale_rows"
    one, entry = next(((one, entry) for one, entry, _ in optimizer._matched() if entry.p is p), (None, None))
    if one is None or entry is None:
        raise ValueError(f"{owner}: {state.kind(p)} is no parameter of this optimizer")
    scale = _per_row(owner, p, factors, state.label(p, entry.name))
    if one.evaluation is not None or "param" in _kept(one, entry)[1].init.values():
        raise ValueError(f"{owner}: {type(one).__name__} keeps other weights beside p, which would not follow")
    put(one, entry, of_entry(one, entry) * _laid_out(scale, p))


def _per_row(owner: str, p: Tensor, factors: Any, label: str) -> Tensor:
    """Return the factors of rows, or of blocks of rows, for each element; ValueError if there are no such."""
    scale = torch.as_tensor(factors, dtype=torch.float32, device=sharding.local(p).device).detach()
    if p.ndim == 0 or scale.ndim != 1 or scale.numel() == 0 or p.shape[0] % scale.numel():
        rows = f"a number for each of {p.shape[0] if p.ndim else 0} rows, or for blocks of as many of them"
        raise ValueError(f"{owner}: expected {rows}, got factors of shape {tuple(scale.shape)}")
    if not bool(scale.isfinite().all()):
        raise ValueError(f"{owner}: the factors of {label} are not all finite")
    per_row = scale.repeat_interleave(p.shape[0] // scale.numel())
    return per_row.reshape(-1, *[1] * (p.ndim - 1)).expand(p.shape)


def evaluated(cls: Any, group: Mapping[str, Any], p: Tensor, kept: Mapping[str, Tensor], name: str | int) -> Tensor:
    """Return `cls.evaluation` of a parameter and its states: fp32, of the shape of p or of this rank's part of it."""
    _, plan, variant = checkpoint.select(cls, group, p, name)
    state.check(variant, p, kept, name)
    code = cls.evaluation.__code__
    given = code.co_varnames[: code.co_argcount]
    names = [name for name in given if name == "p" or name in variant.states]
    options = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    values = sharding.locals_of(sharded_states.decode(plan, variant, p, kept, names))
    values |= {name: kept[name] for name in given if name in variant.host_names}
    hypers = {name: value for name, value in hypers_of(cls, group).items() if name in options}
    made: Tensor = cls.evaluation(**values, **hypers)
    return made.to(torch.float32)


def eval(optimizer: Any) -> None:
    """Put the weights that the model is to be evaluated with into it, if the rule has such (an average of those that it
    trains).

    Until `train()` is called there is no step, and those of training are entries of the states, "trained_weight", so
    that checkpoints, copies and pickles have both.  RuntimeError between the steps of SAM.
    """
    optimizer._refuse_midway("eval()")
    if optimizer.evaluation is None or optimizer._evaluating:
        return
    optimizer._refuse_unready("eval()")
    states = optimizer.state
    with torch.no_grad():
        found = [
            (p, p.detach().clone(), evaluated(type(optimizer), group, p, states[p], name))
            for p, group, *_, name in optimizer._entries()
            if state.of(states, p)
        ]
        for p, trained, value in found:
            states[p] = {**states[p], state.TRAINED: trained}  # a new dict: state dicts share the old one
            sharding.local(p).copy_(value)
    for group in optimizer.param_groups:
        group[MODE] = False


def train(optimizer: Any) -> None:
    """Put back the weights that `eval()` took out, bit for bit, or those of training of a loaded checkpoint."""
    if not optimizer._evaluating:
        return
    optimizer._offload.arrive()
    states = optimizer.state
    with torch.no_grad():
        for p, kept in list(states.items()):
            if isinstance(p, Tensor) and state.TRAINED in kept:
                sharding.local(p).copy_(sharding.local(kept[state.TRAINED]))
                states[p] = {name: value for name, value in kept.items() if name != state.TRAINED}
    for group in optimizer.param_groups:
        group[MODE] = True
