"""The flight recorder: norms and shares of every tensor, measured around a step on a sample of its elements.

A watched step copies the sampled elements of weights, gradients and states, lets the very same kernels run, and
compares the copies with what is there then.  Results are summed on the device and copied to the host without waiting
for it; they are handed over once they have arrived.

Tensors of at most `sample` elements are measured whole.  Of a larger one, runs of RUN elements at equal distances are;
they move on with every watched step, so that none stays unseen, but for up to seven at the end of a tensor.  A norm is
that of the sample times the square root of (elements / sampled).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Owner
from optgen.runtime.records import EIGHT, Field, Variant, as_int
from optgen.runtime.records.join import Pair
from optgen.runtime.states import state
from optgen.runtime.work import counting

RUN = 256
"""Elements in a row that are sampled together, a multiple of EIGHT."""

SAMPLE = 1024
"""Elements of a tensor that are measured by default: the norm of normally distributed ones is then within 2.2 % (one
standard deviation, 1 / sqrt(2 * 1024))."""

TURN = (math.sqrt(5) - 1) / 2
"""Multiples of it modulo 1 come near every number: the part of the way that runs have moved at each watched step."""

Numbers = dict[str, float]
Callback = Callable[[int, dict[str, Numbers]], object]
"""(step, name of a tensor -> its numbers) -> ignored."""


class Writer(Protocol):
    """A writer of scalars, such as a SummaryWriter of TensorBoard."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Add one number under the name of its curve."""


Rows = list[tuple[str, Tensor, Tensor, Mapping[str, Any]]]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sampled(t: Tensor, sample: int, turn: int, width: int = EIGHT) -> Tensor:
    """Return the view of a tensor that is measured at a watched step, whose EIGHT elements have `width` entries."""
    t = t.resolve_neg().contiguous().view(-1)
    units, run, count = t.numel() // width, RUN // EIGHT, max(1, sample // RUN)
    if units <= count * run:
        return t
    stride = units // count
    first = int(turn * TURN % 1 * (units - (count - 1) * stride - run + 1))
    return t.as_strided((count, run * width), (stride * width, 1), t.storage_offset() + first * width)


class WatchTable:
    """Parameters that are stored alike, or their parts on this rank, around a watched step.

    rows    name, weight, gradient and state of each
    fields  those of the weight and the states that have entries for each element
    before  sampled entries of these and of the parameters: "p" or state -> field -> (entries, elements of each row)
    """

    def __init__(self, pair: Pair, variant: Variant, rows: Rows, sample: int, turn: int) -> None:
        self.rows, self.sample, self.turn, self.storage = rows, sample, turn, plans.storage(pair, variant)
        wide = (f for f in variant.fields if f.space == "elem" and not f.part)
        self.fields = [f for f in wide if f.per in (1, EIGHT)]
        self.g, self.sampled = self._entries([g for _, _, g, _ in rows])
        self.before = self._read()

    def _entries(self, tensors: list[Tensor], width: int = EIGHT) -> tuple[Tensor, list[int]]:
        parts = [sampled(t, self.sample, self.turn, width).flatten() for t in tensors]
        return torch.cat(parts).to(self.rows[0][1].device), [x.numel() * EIGHT // width for x in parts]

    def _read(self) -> dict[str, dict[Field | None, tuple[Tensor, list[int]]]]:
        found: dict[str, dict[Field | None, tuple[Tensor, list[int]]]]
        found = {"p": {None: self._entries([p for _, p, _, _ in self.rows])}}
        for f in self.fields:
            entries = self._entries([kept[f.name] for *_, kept in self.rows], _width(f))
            found.setdefault(f.owner, {})[f] = entries
        return found

    def reduce(self) -> Tensor:
        """Return the sums of each parameter after the step: fp32 (rows, 4 and shares of the weight and each state)."""
        after = self._read()
        old, new = (self.storage.weight([x for x, _ in own["p"].values()]) for own in (self.before, after))
        g, update = self.g.to(torch.float32), new - old
        parts = [torch.split(x, self.sampled) for x in (new, g, update)]
        norms = [torch.stack(torch._foreach_norm(x)) for x in parts]
        dots = [torch.dot(*both) for both in zip(*parts[1:], strict=True)]
        still = [_still(self.before[x], after[x]) for x in after]
        return torch.stack([*norms, torch.stack(dots), *still], 1)

    def numbers(self, sums: list[list[float]]) -> dict[str, Numbers]:
        """Return the numbers of each parameter, by name."""
        made: dict[str, Numbers] = {}
        for (name, p, *_), n, row in zip(self.rows, self.sampled, sums, strict=True):
            weight, gradient, update, dot, *still = row
            up = math.sqrt(p.numel() / n)
            made[name] = {
                "weight_norm": weight * up, "gradient_norm": gradient * up, "update_norm": update * up,
                "cosine": _over(-dot, gradient * update), "ratio": _over(update, weight),
                **{f"{'weight' if x == 'p' else x}_still": share for x, share in zip(self.before, still, strict=True)},
                "elements": p.numel(), "sampled": n,
            }  # fmt: skip
        return made


def _width(field: Field | None) -> int:
    """Return how many entries EIGHT elements have; None is the parameter itself."""
    return field.width if field is not None and field.per == EIGHT else EIGHT


def _still(before: Mapping[Field | None, tuple[Tensor, list[int]]], after: Mapping[Field | None, Any]) -> Tensor:
    """Return the share of each row's elements of which no entry has other bits than before."""
    moved = []
    for field, (old, _) in before.items():
        kind, bits = _INTEGERS[old.element_size()], _width(field)
        changed = old.view(kind) ^ after[field][0].view(kind)
        if bits != EIGHT:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=old.device)
            changed = (changed[:, None] >> shifts & (1 << bits) - 1).flatten()
        moved.append(changed != 0)
    still, (_, elements) = ~functools.reduce(torch.logical_or, moved), next(iter(before.values()))
    return torch.stack([x.mean() for x in torch.split(still.to(torch.float32), elements)])


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


class Pending(NamedTuple):
    """Sums on their way to the host.  events: one of each device that they come from."""

    step: int
    tables: list[WatchTable]
    sums: list[Tensor]
    events: list[Any]


class Watch:
    """The flight recorder of one optimizer, until `remove()`; also a context manager, which removes it at its end.

    every   steps from one watched step to the next; the watched ones are its multiples
    sample  elements of each tensor that are measured at most, or their runs; math.inf for all
    """

    def __init__(self, owner: Any, to: Callback | Writer, every: int, sample: float) -> None:
        name, count = f"{type(owner).__name__}.watch", as_int(every)
        if count is None or count < 1 or isinstance(every, bool):
            raise ValueError(f"{name}: every must be a whole number of steps >= 1, got {every!r}")
        if isinstance(sample, bool) or not isinstance(sample, (int, float)) or not sample >= RUN:
            raise ValueError(f"{name}: sample must be a number of elements >= {RUN}, or math.inf, got {sample!r}")
        if not callable(to) and not hasattr(to, "add_scalar"):
            writer = "a writer with add_scalar, such as torch.utils.tensorboard.SummaryWriter()"
            raise ValueError(f"{name}: to must be a function of (step, numbers by name) or {writer}, got {to!r}")
        self.every, self.sample = count, int(sample) if math.isfinite(sample) else 2**62
        self.turn, self.step = 0, -1
        self._owner = owner
        self._to: Callback = to if callable(to) else functools.partial(_write_scalars, to)
        self._tables = list[WatchTable]()
        self._pending: list[Pending] = []

    def begin(self, owner: Owner) -> None:
        """Sample parameters before their step, if it is a watched one."""
        self._tables = []
        if self.step < 0:  # the host waits here, once
            begun = (state.of(owner.states, entry.p) for entry in entries.of(owner.groups))
            self.step = max((state.step_count(one["step"]) or 0 for one in begun if one), default=0)
        if (self.step + 1) % self.every:
            return
        if counting.capturing():
            raise RuntimeError(
                f"{owner.cls.__name__}.watch: a CUDA graph is being captured, which would repeat one measurement into "
                f"the same memory: call remove() on what watch() returned before the capture"
            )
        with torch.no_grad():
            self._tables = self._tables_of(owner)

    def _tables_of(self, owner: Owner) -> list[WatchTable]:
        """Sample the parameters that have a gradient and a state, which a first step makes."""
        alike: dict[object, tuple[Pair, Variant, Rows]] = {}
        for entry in entries.of(owner.groups):
            p, g, kept = entry.p, entry.p.grad, state.of(owner.states, entry.p)
            if g is None or not kept:
                continue
            _, pair, variant = checkpoint.select(owner.cls, entry.group, p, entry.name)
            p, g, kept = sharding.local(p), sharding.local(g), sharding.locals_of(kept)
            fits = variant.keys <= kept.keys() and g.layout is torch.strided and g.shape == p.shape
            if fits and p.numel():  # what does not fit, the step says
                kind = pair.name, id(variant), p.device
                row = str(entry.name), p, state.materialized(g), kept
                alike.setdefault(kind, (pair, variant, []))[2].append(row)
        return [WatchTable(*table, self.sample, self.turn) for table in alike.values()]

    @_disable_dynamo
    def finish(self) -> None:
        """End a step of the optimizer: start the copies of its numbers to the host, and hand over those that came."""
        self.step += self.step >= 0
        if self._tables:
            with torch.no_grad():
                sums = [table.reduce() for table in self._tables]
            events: list[Any] = []
            if there := {x.device for x in sums if x.is_cuda}:
                sums = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in sums]
                events = [torch.cuda.current_stream(device).record_event() for device in there]
            self._pending.append(Pending(self.step, self._tables, sums, events))
            self._tables, self.turn = [], self.turn + 1
        while self._pending and all(event.query() for event in self._pending[0].events):
            self._hand_over(self._pending.pop(0))

    def _hand_over(self, one: Pending) -> None:
        for event in one.events:
            event.synchronize()
        rows: dict[str, Numbers] = {}
        for table, sums in zip(one.tables, one.sums, strict=True):
            rows |= table.numbers(sums.tolist())
        self._to(one.step, rows)

    def flush(self) -> None:
        """Wait for numbers that are on their way, and hand them over."""
        while self._pending:
            self._hand_over(self._pending.pop(0))

    def remove(self) -> None:
        """Hand over what is on its way, and end the measurements."""
        self.flush()
        if self._owner._watch is self:
            self._owner._watch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _write_scalars(writer: Writer, step: int, rows: Mapping[str, Numbers]) -> None:
    """Add a scalar "number/tensor" for each number: TensorBoard puts one number of all tensors in one section."""
    for name, row in rows.items():
        for key, value in row.items():
            writer.add_scalar(f"{key}/{name}", value, step)


def watch(self: Any, every: int = 100, *, to: Callback | Writer, sample: float = SAMPLE) -> Watch:
    """Measure every tensor at each step that is a multiple of `every`, until `remove()` of what is returned.

    to      a function of (step, {name: {"gradient_norm": ...}}), or a writer with `add_scalar(tag, value, step)`, such
            as torch.utils.tensorboard.SummaryWriter()
    sample  elements of each tensor that are measured at most; math.inf for all
    Numbers, their costs and what is not measured: docs/watch.md.  Bits of the step do not change.  RuntimeError if it
    is watched already, or its gradients are released.
    """
    if self._watch is not None:
        raise RuntimeError(f"{type(self).__name__}.watch: it is watched already; remove() that watch first")
    if self._release is not None:
        raise RuntimeError(f"{type(self).__name__}.watch: released gradients are gone at step(); remove() their handle")
    self._watch = made = Watch(self, to, every, sample)
    return made
