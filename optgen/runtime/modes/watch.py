"""The flight recorder: norms and shares of every tensor, measured around a step on a sample of its elements.

A watched step copies the sampled elements of weights, gradients and states, lets the very same kernels run, copies the
weights and states again, and reduces both in a few operations for all tensors that are stored alike.  Results are
summed on the device and copied to the host without waiting for it; they are handed over once they have arrived.

Tensors of at most `sample` elements are measured whole.  Of a larger one, runs of RUN elements at equal distances are;
they move on with every watched step, so that none stays unseen, but for up to seven at the end of a tensor.  A norm is
that of the sample times the square root of (elements / sampled).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.layout.plans import Label
from optgen.runtime.layout.workspace import sent
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import EIGHT, Field, Variant, as_int
from optgen.runtime.records.join import Pair
from optgen.runtime.states import state
from optgen.runtime.work import counting

RUN = 256
"""Elements in a row that are sampled together, a multiple of EIGHT."""

SAMPLE = 1024
"""Elements of a tensor that are measured by default: the norm of normally distributed ones is then within 2.2 % (one
standard deviation, 1 / sqrt(2 * 1024))."""

Numbers = dict[str, float]
Callback = Callable[[int, dict[str, Numbers]], object]
"""(step, name of a tensor -> its numbers) -> ignored."""


class Writer(Protocol):
    """A writer of scalars, such as a SummaryWriter of TensorBoard."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Add one number under the name of its curve."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Spots(NamedTuple):
    """The sampled entries of a flat tensor whose EIGHT elements have `width` entries.

    size, strides  of a view of them: runs in which they are, and entries of a run
    step, moves    how far the runs move from one watched step to the next, before which distance they begin again
    """

    size: tuple[int, int]
    strides: tuple[int, int]
    step: int
    moves: int

    @classmethod
    def of(cls, entries: int, sample: int, width: int) -> Spots:
        run, most = RUN * width // EIGHT, sample * width // EIGHT
        if entries <= max(most, run):
            return cls((1, entries), (entries, 1), 0, 1)
        count, units = max(1, most // run), entries // width
        stride = units // count
        moves = units - (count - 1) * stride - run // width + 1
        step = next(s for s in range(run // width, 0, -1) if math.gcd(s, moves) == 1)  # so that every place is reached
        return cls((count, run), (stride * width, 1), step * width, moves * width)

    @property
    def entries(self) -> int:
        return self.size[0] * self.size[1]

    def view(self, t: Tensor, turn: int) -> Tensor:
        """Return the view at a watched step."""
        if not t.is_contiguous() or t.is_neg():
            t = t.resolve_neg().contiguous()
        return t.as_strided(self.size, self.strides, t.storage_offset() + turn * self.step % self.moves)


class Buffer:
    """The sampled entries of one kind of tensor, of all parameters of a table, before and after a step.

    entries  (2, runs in all, entries of RUN elements); `fill` where nothing was sampled
    width    bits of an element that share bytes with others; EIGHT of one with entries of its own
    owners   int64, (runs in all): the row of the table
    sampled  elements of each row
    """

    def __init__(self, like: list[Tensor], sample: int, device: torch.device, field: Field | None) -> None:
        self.width = width = field.width if field is not None and field.per == EIGHT else EIGHT
        self.spots = [Spots.of(t.numel(), sample, width) for t in like]
        self._moving = [(k, spots) for k, spots in enumerate(self.spots) if spots.step]  # others are measured whole
        run = RUN * width // EIGHT
        runs = [-(-one.entries // run) for one in self.spots]
        self.sampled = [one.entries * EIGHT // width for one in self.spots]
        fill = field.zero if field is not None and field.owner == "p" else 0
        self.entries = torch.full((2, sum(runs), run), fill, dtype=like[0].dtype, device=device)
        owners = [k for k, n in enumerate(runs) for _ in range(n)]
        self.owners = sent(torch.tensor(owners, dtype=torch.int64, device="cpu"), device)
        self._targets: list[list[Tensor]] = []
        for half in self.entries.flatten(1).unbind():
            starts = itertools.accumulate((n * run for n in runs), initial=0)
            both = zip(self.spots, starts, strict=False)
            parts = [half[start : start + one.entries].view(one.size) for one, start in both]
            shapes = (part.shape if one.step else t.shape for one, part, t in zip(self.spots, parts, like, strict=True))
            self._targets.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def copy(self, half: int, tensors: list[Tensor], turn: int) -> None:
        """Copy what the tensors hold before (0) or after (1) a watched step."""
        for k, spots in self._moving:
            tensors[k] = spots.view(tensors[k], turn)
        torch._foreach_copy_(self._targets[half], tensors)

    def sum(self, *columns: Tensor) -> Tensor:
        """Return the sums (rows, columns) of values (runs)."""
        values = torch.stack([column.to(torch.float32) for column in columns], 1)
        return values.new_zeros((len(self.sampled), len(columns))).index_add_(0, self.owners, values)

    def moved(self) -> Tensor:
        """Return which elements have other bits than before the step."""
        before, after = self.entries.view(_INTEGERS[self.entries.element_size()]).unbind()
        if self.width == EIGHT:
            return before != after
        shifts = torch.arange(0, 8, self.width, dtype=torch.uint8, device=before.device)
        return ((before ^ after)[..., None] >> shifts & (1 << self.width) - 1).flatten(1) != 0


@functools.lru_cache(maxsize=1024)
def coded(variant: Variant, owner: str) -> tuple[Field, ...]:
    """Return the fields of a state, or of "p", that have entries for each element."""
    found = (f for f in variant.fields if f.owner == owner and f.space == "elem" and not f.part)
    return tuple(f for f in found if f.per == 1 or f.per == EIGHT)


GRADIENT, WEIGHT = "the gradient", "the weight"
"""The keys of a parameter's tensors that are no field of its state; names of fields are without spaces."""


class Sampled(NamedTuple):
    """The parts on this rank of a parameter, its gradient and its state."""

    name: Label
    p: Tensor
    g: Tensor
    kept: Mapping[str, Any]

    def tensor(self, key: str) -> Tensor:
        """Return a field of the state, the gradient or the weight."""
        found: Tensor = self.g if key == GRADIENT else self.p if key == WEIGHT else self.kept[key]
        return found


class WatchTable:
    """The measurements of parameters that are stored alike, and were around the last watched step.

    rows     the positions of the parameters in the list of a step
    buffers  by the key of the tensors
    """

    def __init__(self, pair: Pair, variant: Variant, rows: list[int], found: Sequence[Sampled], sample: int) -> None:
        self.pair, self.variant, self.rows = pair, variant, rows
        self.params = [found[k].p for k in rows]
        self.names = [str(found[k].name) for k in rows]
        self.owners = {owner: fields for owner in ("p", *variant.states) if (fields := coded(variant, owner))}
        self.buffers: dict[str, Buffer] = {}
        each: dict[str, Field | None] = {GRADIENT: None, WEIGHT: None}
        each |= {f.name: f for own in self.owners.values() for f in own}
        for key, field in each.items():
            like = [found[k].tensor(key) for k in rows]
            self.buffers[key] = Buffer(like, sample, self.params[0].device, field)

    def copy(self, half: int, found: Sequence[Sampled], turn: int) -> None:
        """Sample weights and states before (0) or after (1) a step, gradients before it."""
        for key, buffer in self.buffers.items():
            if not (half and key == GRADIENT):
                buffer.copy(half, [found[k].tensor(key) for k in self.rows], turn)

    def _moved(self, *keys: str) -> Tensor:
        """Return how many elements have other bits than before, by runs."""
        return _count(functools.reduce(torch.logical_or, [self.buffers[key].moved() for key in keys]))

    def reduce(self) -> Tensor:
        """Return the sums of each parameter: fp32 (parameters, 5 and 1 for each state)."""
        weight, low = self.buffers[WEIGHT], [f.name for f in self.owners.get("p", ())]
        parts = [self.buffers[key].entries.flatten() for key in (WEIGHT, *low)]
        before, after = plans.storage(self.pair, self.variant).weight(parts).view(weight.entries.shape).unbind()
        g = self.buffers[GRADIENT].entries[0].to(torch.float32)
        update = after - before
        squares = (torch.linalg.vector_norm(x, dim=1).square() for x in (after, g, update))
        sums = weight.sum(*squares, (g * update).sum(1), self._moved(WEIGHT, *low))
        states = [own for owner, own in self.owners.items() if owner != "p"]
        still = (self.buffers[own[0].name].sum(self._moved(*(f.name for f in own))) for own in states)
        return torch.cat([sums, *still], 1)

    def numbers(self, sums: list[list[float]]) -> dict[str, Numbers]:
        """Return the numbers of each parameter, by name."""
        made: dict[str, Numbers] = {}
        for k, (name, p, (weight, gradient, update, dot, *moved)) in enumerate(
            zip(self.names, self.params, sums, strict=True)
        ):
            n = self.buffers[WEIGHT].sampled[k]
            up = p.numel() / n
            row = {
                "weight_norm": math.sqrt(weight * up), "gradient_norm": math.sqrt(gradient * up),
                "update_norm": math.sqrt(update * up), "cosine": _over(-dot, math.sqrt(gradient * update)),
                "ratio": math.sqrt(_over(update, weight)),
            }  # fmt: skip
            kept = {"weight": WEIGHT} | {x: own[0].name for x, own in self.owners.items() if x != "p"}
            for (owner, key), count in zip(kept.items(), moved, strict=True):
                row[f"{owner}_still"] = 1 - count / self.buffers[key].sampled[k]
            made[name] = {**row, "elements": p.numel(), "sampled": n}
        return made


def _count(x: Tensor) -> Tensor:
    """Count what is true in each row; torch.count_nonzero takes twice as long."""
    return x.view(torch.uint8).sum(1, dtype=torch.int32)


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
        self._found, self._tables = list[Sampled](), list[WatchTable]()
        self._signature, self._known = list[object](), list[WatchTable]()
        self._pending: list[Pending] = []

    def begin(self, owner: Owner) -> None:
        """Sample parameters before their step, if it is a watched one."""
        self._found, self._tables = [], []
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
        listed, found, signature = list[Entry](), list[Sampled](), list[object]()
        for entry in entries.of(owner.groups):
            p, g, kept = entry.p, entry.p.grad, state.of(owner.states, entry.p)
            if g is None or not kept:  # a first step makes the state
                continue
            if type(p) is not torch.nn.Parameter:
                p, g, kept = sharding.local(p), sharding.local(g), sharding.locals_of(kept)
            if not p.numel() or g.layout is not torch.strided or g.shape != p.shape:  # what does not fit, the step says
                continue
            found.append(Sampled(entry.name, p, state.materialized(g), kept))
            listed.append(entry)
            signature += [id(p), entry.name, p.shape, g.dtype, *kept]
        with torch.no_grad():
            if signature != self._signature:
                self._known = self._tables_of(owner, listed, found)
                whole = sum(len(table.rows) for table in self._known) == len(found)
                self._signature = signature if whole else []  # options that are set back fit again
            for table in self._known:
                table.copy(0, found, self.turn)
        self._found, self._tables = found, list(self._known)

    def _tables_of(self, owner: Owner, listed: list[Entry], found: list[Sampled]) -> list[WatchTable]:
        """Make a table for the parameters that are stored alike, without those that lack states of their step."""
        alike: dict[object, tuple[Pair, Variant, list[int]]] = {}
        for k, (entry, one) in enumerate(zip(listed, found, strict=True)):
            _, pair, variant = checkpoint.select(owner.cls, entry.group, entry.p, entry.name)
            if not variant.keys <= one.kept.keys():  # the step says what does not fit
                continue
            kind = (pair.name, id(variant), one.p.device, one.g.dtype)
            alike.setdefault(kind, (pair, variant, []))[2].append(k)
        return [WatchTable(pair, variant, rows, found, self.sample) for pair, variant, rows in alike.values()]

    def end(self) -> None:
        """Sample parameters after their step."""
        with torch.no_grad():
            for table in self._tables:
                table.copy(1, self._found, self.turn)
        self._found = []

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
