"""`optgen.diagnose`: the weights and states of an optimizer that rounding keeps where they are, and what helps.

Of each tensor some chunks are read, between two steps, and nothing is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optgen.base.errors import UserError
from optgen.convert import stored
from optgen.convert.stored import GRIDS, Cells, Stored
from optgen.convert.updates import SECOND, STILL, Rule
from optgen.driver.terminal import table
from optgen.lang.spec import Spec
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.optimizer import Optimizer
from optgen.runtime.options import entries
from optgen.runtime.records import dtype_name
from optgen.verify import stall

CHUNK, SAMPLE = 1 << 16, 1 << 18
"""Elements that are read at once, and of a tensor: were they independent, shares would be within .2 % (two standard
deviations)."""

LEAST, BARE = 0.1, 1e-3
"""Shares from which on there is a finding, and one of second moments that read as 0."""

TINY = 1e-30
"""States below this are of weights that have had no gradient for long: they end among the last numbers of float32."""

BETAS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
WEIGHTS = "weights"


@dataclass(frozen=True)
class Row:
    """The weights of a parameter group, or a state in one of the forms in which its tensors are kept.

    stays   share that rounding keeps where it is: of weights that have an update; of numbers of a state that are
            stored as themselves under its decay alone; None where the update, or decay, is not known
    decay   the factor of a state in a step
    stops   the least of BETAS under which half of a state stays
    bare    share of second moments that read as 0 where the first do not: the step is divided by eps alone
    update  the root of the mean square of the weights' last step, divided by lr
    worst   the tensors of which the largest shares stay, or are bare
    """

    group: int
    name: str
    form: str
    stays: float | None = None
    decay: float | None = None
    stops: float | None = None
    bare: float = 0.0
    update: float | None = None
    worst: tuple[tuple[str, float], ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """The row in words."""
        decay = "" if self.decay is None else f"beta {self.decay:g}"
        stops = "" if self.stops is None else f"half of it from beta {self.stops:g} on"
        size = decay if self.update is None else f"lr x {self.update:.2g}"
        return self.name, self.form, size, "?" if self.stays is None else f"{self.stays:.1%} stay", stops


@dataclass(frozen=True)
class Finding:
    """A reason why an optimizer does not move; `mend` is a line of code."""

    row: Row
    reason: str
    mend: str

    def __str__(self) -> str:
        worst = ", ".join(f"{name} {share:.1%}" for name, share in self.row.worst)
        lines = f"group {self.row.group}, {self.row.name}: {self.reason}\n" + f"    worst: {worst}\n" * bool(worst)
        return f"{lines}    mend: {self.mend}"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; printed as a report.

    groups               each in words
    bytes_per_parameter  of each
    """

    optimizer: str
    groups: tuple[str, ...]
    bytes_per_parameter: tuple[float, ...]
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"{self.optimizer}: {count or 'no'} finding{'s' * (count != 1)}"]
        for n, group in enumerate(self.groups):
            lines.append(f"group {n}: {group}")
            lines += table(("",) * 5, [row.cells for row in self.rows if row.group == n]).splitlines()
        return "\n".join([*lines, *map(str, self.findings), *(f"note: {note}" for note in self.notes)])


def diagnose(optimizer: torch.optim.Optimizer, model: Any = None) -> Diagnosis:
    """Return which weights and states of an optimizer rounding keeps where they are; `print` shows a report.

    optimizer  any torch.optim.Optimizer, after a step; SGD without momentum before `zero_grad()`
    model      names its parameters where the optimizer has no names

    Nothing is changed.  Of sharded parameters the parts on this rank are read.
    """
    optimizer = _unwrapped(optimizer)
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    with torch.no_grad():
        groups = [_Group(names, *place) for place in _places(optimizer)]
    rows = [(group, row) for n, group in enumerate(groups) for row in group.rows(n)]
    return Diagnosis(
        type(optimizer).__name__, tuple(map(str, groups)), tuple(group.per_element for group in groups),
        tuple(row for _, row in rows), tuple(finding for group, row in rows for finding in group.findings(row)),
        tuple({note: None for group in groups for note in group.notes}),
    )  # fmt: skip


def _places(optimizer: Any) -> list[tuple[Any, int, str]]:
    """Return the optimizer of one rule that has each group, the group's place there, and what code calls it."""
    own = getattr(optimizer, "parts", {})
    keys = [repr(key) if isinstance(key, str) else f"[*opt.parts][{n}]" for n, key in enumerate(own)]
    parts = {f"opt.parts[{key}]": part for key, part in zip(keys, own.values(), strict=True)} or {"opt": optimizer}
    of = {id(group): (part, n, name) for name, part in parts.items() for n, group in enumerate(part.param_groups)}
    return [of[id(group)] for group in optimizer.param_groups]


class _Group:
    """The measurements of a parameter group; `name`: what code calls its optimizer."""

    def __init__(self, names: Mapping[int, str], optimizer: Any, place: int, name: str) -> None:
        self.optimizer, self.group, self.name = optimizer, optimizer.param_groups[place], name
        self.rule, self.notes, size = Rule.of(optimizer, self.group), list[str](), 0
        self.sums: dict[tuple[str, str], dict[str, Counter[str]]] = {}  # (state, form) -> tensor -> sums over elements
        self.discouraged: dict[tuple[str, str], str] = {}  # of optgen's plans
        for p, label in zip(self.group["params"], entries.labels(optimizer.param_groups)[place], strict=True):
            entry = optimizer.state.get(p) or {}
            own = (value for key, value in entry.items() if str(key)[:4] not in ("qmap", "step"))
            size += stored.size(p) + sum(map(stored.size, own))
            if p.requires_grad and (entry or p.grad is not None):
                shown = label if isinstance(label, str) else f"{label} {list(p.shape)}"
                self.measure(p, entry, label, names.get(id(p), shown))
            else:
                self.notes.append("frozen parameters, and those without a state and a gradient, were not measured")
        if any(name == WEIGHTS and not any(c["read"] for c in each.values()) for (name, _), each in self.sums.items()):
            self.notes.append("?: before a first step, of states that are not read, or of a rule that is not known")
        self.numel = sum(stored.local(p).numel() for p in self.group["params"])
        self.per_element = size / max(self.numel, 1)

    def number(self, option: str, otherwise: float = 0.0) -> float:
        """Return a number of the group."""
        value = self.group.get(option)
        return otherwise if value is None else float(value)

    def __str__(self) -> str:
        size = f"{self.numel:,} elements, {self.per_element:.4g} bytes per parameter"
        return f"{len(self.group['params'])} tensors, {size}, lr {self.number('lr', math.nan):.3g}"

    def measure(self, p: Tensor, entry: Mapping[str, Any], label: Any, name: str) -> None:
        """Add the sums of a parameter and its states."""
        kept, (extra, random) = stored.states(self.optimizer, p), self.beside(p, entry)
        if isinstance(self.optimizer, Optimizer):
            kept, extra, random = self.own(p, label, kept)
        master = kept.pop("master_param", Stored("", None)).read
        how = "stochastic" if random else f"and {extra} bits" if extra else "to nearest"
        how = f"{dtype_name(p.dtype)}, {how if master is None else 'and a master copy'}"
        forms = {WEIGHTS: how} | {key: one.form for key, one in kept.items()}
        sums = {key: self.sums.setdefault((key, forms[key]), {}).setdefault(name, Counter()) for key in forms}
        reads: dict[str, Any] = {key: one.read for key, one in kept.items() if one.read is not None}
        for key, t in (("weight", p), ("gradient", p.grad)):
            if (read := stored.floats(t)) is not None:
                reads[key] = read
        reads["weight"] = master or reads.get("weight")
        if reads["weight"] is not None:
            known, count = kept.keys() <= reads.keys(), stored.local(p).numel()
            apart = max(1, math.ceil(math.ceil(count / CHUNK) / (SAMPLE // CHUNK)))
            for start in range(0, count, CHUNK * apart):
                at = start, min(start + CHUNK, count)
                self.read(reads, at, sums, entry.get("step") if known else math.nan, 2.0**-extra, random)

    def read(self, reads: Mapping[str, Any], at: tuple[int, int], sums: Mapping[str, Counter[str]], step: Any,
             fine: float, random: bool) -> None:  # fmt: skip
        """Add the sums of a chunk; a step of NaN is that of states which cannot all be read."""
        w = reads["weight"](*at)
        cells = {key: read(*at).to(w.value.device) for key, read in reads.items()}
        x = {key: one.value for key, one in cells.items()}
        update = None if step is math.nan else self.rule.update(x, self.group, step)
        if update is not None:
            sums[WEIGHTS].update(self.of_weights(w, update, fine, random))
        for key in sums.keys() & cells.keys():
            sums[key].update(self.of_state(key, cells[key], x))

    def of_weights(self, w: Cells, update: Tensor, fine: float, random: bool) -> dict[str, float]:
        """Return the sums of a chunk of weights; with bits beside them their cells are `fine` times as wide."""
        decay = self.number("weight_decay") * w.value if self.rule.decoupled else torch.zeros(())
        delta, some = (update + decay.to(update)) * self.number("lr"), update * self.number("lr") != 0
        half = torch.where(delta * w.value > 0, w.below, w.above) * fine
        squares = float(update.double().square().sum())
        counts = _counts(some=some, stays=(delta.abs() <= half) & some & (not random))
        return {"squares": squares, "read": float(update.numel())} | counts

    def of_state(self, key: str, one: Cells, x: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the sums of a chunk of a state."""
        some, decay = one.value.abs() > TINY, self.rule.decay(key, self.group)
        sums = _counts(some=some, **{f"at {beta}": one.keep(beta * one.value) & some for beta in BETAS})
        if decay is not None:
            sums |= _counts(stays=one.keep(decay * one.value) & some)
        if key == "exp_avg_sq" and "exp_avg" in x:
            bare = (one.value == 0) & (x["exp_avg"].abs() > STILL * self.number("eps"))
            sums |= _counts(read=torch.ones_like(some), bare=bare)
        return sums

    def beside(self, p: Tensor, entry: Mapping[str, Any]) -> tuple[int, bool]:
        """Return the bits that a package keeps beside a weight of 16 bits, and if it rounds that stochastically."""
        errors = entry.get("error_bits", entry.get("master_param"))
        asked = getattr(self.optimizer, "bf16_stochastic_round", self.group.get("stochastic_rounding", False))
        random = bool(asked) and p.dtype is not torch.float32
        if isinstance(errors, Tensor) and not errors.is_floating_point():
            return 8 * errors.element_size(), random
        return 8 * any(key in entry for key in ("compensation", "kahan_comp")), random

    def own(self, p: Tensor, label: Any, kept: dict[str, Stored]) -> tuple[dict[str, Stored], int, bool]:
        """Return the states of an optimizer of optgen by its plan, and of its weights what `beside` returns."""
        _, pair, variant = checkpoint.select(type(self.optimizer), self.group, p, label)
        random, found = {*variant.eager.noise, *variant.eager.random}, {}
        for name in dict.fromkeys(f.owner for f in variant.fields if f.space == "elem" and f.owner != "p"):
            form = f"{pair.name}, {'stochastic' if name in random else 'to nearest'}"
            found[name] = kept[name] if name in kept and name not in random else Stored(form, None)
            if found[name].read is None and name not in random and name in pair.discouraged:
                self.discouraged[name, form] = pair.discouraged[name]
        extra = sum(8 * f.torch_dtype.itemsize for f in variant.fields if f.owner == "p")
        return found, min(extra, 16), "p" in random

    # -- what follows

    def rows(self, number: int) -> Iterator[Row]:
        """Yield the rows of the group."""
        for (name, form), each in self.sums.items():
            c: Counter[str] = Counter()
            for sums in each.values():
                c.update(sums)
            bare, decay = _ratio(c, "bare", "read") or 0.0, self.rule.decay(name, self.group)
            known = c["read"] > 0 if name == WEIGHTS else decay is not None
            stays = 0.0 if form.endswith("stochastic") else _ratio(c, "stays", "some") if known else None
            stops = next((beta for beta in BETAS if c["some"] and c[f"at {beta}"] >= c["some"] / 2), None)
            square = _ratio(c, "squares", "read") if name == WEIGHTS else None
            update = None if square is None else math.sqrt(square)
            worst = _worst(each, *(("bare", "read") if bare >= BARE else ("stays", "some")))
            yield Row(number, name, form, stays, decay, stops, bare, update, worst)

    def findings(self, row: Row) -> Iterator[Finding]:
        """Yield what is wrong."""
        reasons = [self.discouraged.get((row.name, row.form), "")]
        if (row.stays or 0.0) >= LEAST and row.name == WEIGHTS:
            reasons.append(f"lr x update is below half of the last place of {row.stays:.1%}: these do not move")
        if (row.stays or 0.0) >= LEAST and row.name in SECOND:  # gradients of both signs move the others
            reasons.append(f"{row.stays:.1%} of it stays the same under beta {row.decay:g}: nothing makes it smaller")
        if row.bare >= BARE:
            reasons.append(f"{row.bare:.1%} of it reads as 0 where exp_avg does not: that step is divided by eps alone")
        if row.name in SECOND and not self.group.get("fused"):
            reasons.append(lost_eps(self.group.get("eps"), row.form.removesuffix(", to nearest")))
        yield from (Finding(row, reason, self.mend(row)) for reason in reasons if reason)

    def mend(self, row: Row) -> str:
        """Return a line of code, for an optimizer `opt` of a `model`."""
        if row.name == WEIGHTS and row.form.startswith("float32"):
            return f"opt.param_groups[{row.group}]['lr'] *= 10  # not even float32 holds this step"
        if not self.rule.ready and not isinstance(self.optimizer, Optimizer):
            return "model.float()  # before the optimizer is made"
        plan = "int8" if all(p.dtype is torch.float32 for p in self.group["params"]) else "int8_split24"
        made = f"optgen.optim.{self.rule.ready}" if self.rule.ready else f"type({self.name})"
        made = f'{made}([{{**g, "plan": "{plan}"}} for g in {self.name}.param_groups])'
        key = self.name.removeprefix("opt.parts[")[:-1]
        return f"opt = {made}" if self.name == "opt" else f"opt = type(opt)({{**opt.parts, {key}: {made}}})"


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of what a framework wraps around it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"diagnose: expected a torch.optim.Optimizer, got {optimizer!r:.80}")
    return optimizer


def _counts(**masks: Tensor) -> dict[str, float]:
    return {name: float(mask.sum()) for name, mask in masks.items()}


def _worst(each: Mapping[str, Mapping[str, float]], part: str, of: str) -> tuple[tuple[str, float], ...]:
    shares = sorted(((_ratio(sums, part, of) or 0.0, name) for name, sums in each.items()), reverse=True)
    return tuple((name, share) for share, name in shares[:3] if share)


def _ratio(sums: Mapping[str, float], part: str, of: str) -> float | None:
    return sums[part] / sums[of] if sums[of] else None


def lost_eps(eps: Any, name: str) -> str:
    """Return the reason where eps is 0 in a dtype, in which torch.optim adds it to the root of second moments."""
    dtype = next((dtype for dtype in GRIDS if dtype_name(dtype) == name), torch.float64)
    if not isinstance(eps, float) or not eps or torch.tensor(eps, dtype=dtype).item():
        return ""
    least = 2.0 ** (GRIDS[dtype][1] - GRIDS[dtype][0])
    return f"eps {eps:g} is below half of the smallest number of {name}, {least:.2g}, and reads as 0"


# -- before a run

COMPARED = 3e-4
"""The largest rate at which AdamW's predictions are within a tenth of what trained models show (docs/frozen.md)."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def predicted(spec: Spec, dtype: str, options: Mapping[str, Any], **settings: Any) -> tuple[list[Row], str]:
    """Return the rows of weights and states of a dtype that `stall.predict` gives, and what `lost_eps` says.

    options  hyper-parameters by name; UserError for those that the rule does not have, and out of their ranges
    """
    known = {h.name: h for h in spec.hypers}
    for name, value in options.items():
        try:
            known[name].check(value, spec.name)
        except (KeyError, TypeError, ValueError):
            takes = ", ".join(f"{h.name} ({len(h.parts)}) {h.range}".rstrip() for h in known.values())
            want = f"one of the options of {spec.name}, with their numbers and ranges: {takes}"
            raise UserError("E411", option=f"--{name}", want=want, got=str(value)) from None
    found = stall.predict(spec, DTYPES[dtype], options, **settings)
    rows = [Row(0, name, f"{dtype}, to nearest", share) for name, share in found.items()]
    return rows, lost_eps({**spec.defaults, **options}.get("eps"), dtype_name(DTYPES[dtype]))
