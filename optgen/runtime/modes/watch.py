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
from collections.abc import Callable, Iterable, Mapping
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
    owners   int64, (runs in all): the row of the table
    sampled  elements of each row
    once     whether they are sampled before the step only
    """

    def __init__(self, like: list[Tensor], sample: int, device: torch.device, field: Field | None, once: bool = False):
        width = field.width if field is not None and field.per == EIGHT else EIGHT
        self.once, self.spots = once, [Spots.of(t.numel(), sample, width) for t in like]
        self._moving = [(k, spots) for k, spots in enumerate(self.spots) if spots.step]  # others are measured whole
        run = RUN * width // EIGHT
        runs = [-(-one.entries // run) for one in self.spots]
        self.sampled = [one.entries * EIGHT // width for one in self.spots]
        fill = field.zero if field is not None and field.owner == "p" else 0
        self.entries = torch.full((2 - once, sum(runs), run), fill, dtype=like[0].dtype, device=device)
        owners = [k for k, n in enumerate(runs) for _ in range(n)]
        self.owners = sent(torch.tensor(owners, dtype=torch.int64, device="cpu"), device)
        self._targets: list[list[Tensor]] = []
        self._sources: list[Tensor] = []
        self._again: list[tuple[int, Spots, Tensor, int]] = []
        for half in self.entries.flatten(1).unbind():
            starts = itertools.accumulate((n * run for n in runs), initial=0)
            both = zip(self.spots, starts, strict=False)
            parts = [half[start : start + one.entries].view(one.size) for one, start in both]
            shapes = (part.shape if one.step else t.shape for one, part, t in zip(self.spots, parts, like, strict=True))
            self._targets.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def begin(self, tensors: Iterable[Tensor], turn: int) -> None:
        """Copy what the tensors hold before the step."""
        self._sources, self._again = list(tensors), []
        for k, spots in self._moving:
            t = self._sources[k]
            self._sources[k] = spots.view(t, turn)
            if not t.is_contiguous():  # then that is a view of a copy
                self._again.append((k, spots, t, turn))
        torch._foreach_copy_(self._targets[0], self._sources)
        if self.once:
            self._sources, self._again = [], []

    def end(self) -> None:
        """Copy what they hold after it."""
        for k, spots, t, turn in self._again:
            self._sources[k] = spots.view(t, turn)
        torch._foreach_copy_(self._targets[1], self._sources)
        self._sources, self._again = [], []

    def sum(self, *columns: Tensor) -> Tensor:
        """Return the sums (rows, columns) of values (runs)."""
        values = torch.stack([column.to(torch.float32) for column in columns], 1)
        return values.new_zeros((len(self.sampled), len(columns))).index_add_(0, self.owners, values)

    def moved(self) -> Tensor:
        """Return which entries have other bits than before the step."""
        bits = self.entries.view(_INTEGERS[self.entries.element_size()])
        return bits[0] != bits[1]


@functools.lru_cache(maxsize=256)
def ends(pair: Pair, variant: Variant, owner: str) -> tuple[int, int] | None:
    """Return the codes of -1 and 1 in a block of these, or twice that of 0 if no value of the state is negative; None
    if it has no codes, or scales of a whole tensor."""
    codes = coded(variant, owner)
    whole = owner in variant.eager.whole
    if not codes or whole or any(f.torch_dtype is not torch.uint8 for f in codes):
        return None
    size = max(variant.block_of([owner]), 2)
    x = torch.tensor([0.0 if owner in variant.nonneg else -1.0, 1.0]).repeat(size // 2)[None, None]
    code, shift = torch.zeros((1, 1, size), dtype=torch.int64), 0
    storage = plans.storage(pair, variant)
    for name, field in zip(variant.owned(owner), storage.nearest(owner, x), strict=False):
        for f in codes:
            if f.name == name:
                width = f.width if f.per == EIGHT else 8
                code |= (field.long() & (1 << width) - 1) << shift
                shift += width
    low, high = code.flatten()[:2].tolist()
    return low, low if owner in variant.nonneg else high


@functools.lru_cache(maxsize=1024)
def coded(variant: Variant, owner: str) -> tuple[Field, ...]:
    """Return the fields of a state, or of "p", that have entries for each element."""
    found = (f for f in variant.fields if f.owner == owner and f.space == "elem" and not f.part)
    return tuple(f for f in found if f.per == 1 or f.per == EIGHT)


class WatchTable:
    """The measurements of parameters that are stored alike, and were around the last watched step."""

    def __init__(self, pair: Pair, variant: Variant, found: list[Sampled], sample: int) -> None:
        self.pair, self.variant = pair, variant
        self.names = [str(one.name) for one in found]
        self.numel = [one.p.numel() for one in found]
        device = found[0].p.device
        self.gradient = Buffer([one.g for one in found], sample, device, None, once=True)
        self.weight = [Buffer([one.p for one in found], sample, device, None)]
        fields = [(f, Buffer([one.kept[f.name] for one in found], sample, device, f)) for f in coded(variant, "p")]
        self.weight += [buffer for _, buffer in fields]
        self.states: dict[str, list[Buffer]] = {}
        for owner in variant.states:
            for f in coded(variant, owner):
                fields.append((f, Buffer([one.kept[f.name] for one in found], sample, device, f)))
                self.states.setdefault(owner, []).append(fields[-1][1])
        self._fields = fields
        self._ends: dict[str, Tensor] = {}

    def begin(self, found: list[Sampled], turn: int) -> None:
        """Sample weights, gradients and states before a step."""
        self.gradient.begin([one.g for one in found], turn)
        self.weight[0].begin([one.p for one in found], turn)
        for f, buffer in self._fields:
            buffer.begin([one.kept[f.name] for one in found], turn)

    def end(self) -> None:
        """Sample weights and states after it."""
        for buffer in (self.weight[0], *(buffer for _, buffer in self._fields)):
            buffer.end()

    def reduce(self) -> Tensor:
        """Return the sums of each parameter: fp32 (parameters, 7 and 2 for each state)."""
        plain = self.weight[0]
        parts = [one.entries.flatten() for one in self.weight]
        before, after = plans.storage(self.pair, self.variant).weight(parts).view(plain.entries.shape).unbind()
        g = self.gradient.entries[0].to(torch.float32)
        update = after - before
        ratio = (update / after).abs_().nan_to_num_(nan=0.0, posinf=math.inf).amax(1)  # 0 where both are 0
        largest = ratio.new_zeros(len(self.names)).scatter_reduce_(0, plain.owners, ratio, "amax")
        moved = functools.reduce(torch.logical_or, [one.moved() for one in self.weight])
        found = plain.sum(
            *(torch.linalg.vector_norm(x, dim=1).square() for x in (after, g, update)), (g * update).sum(1),
            *((x * 0).nan_to_num_(nan=1.0).sum(1) for x in (g, after)), _count(moved),
        )  # fmt: skip
        return torch.cat([found, *(self._of_state(*one) for one in self.states.items()), largest[:, None]], 1)

    def _of_state(self, owner: str, buffers: list[Buffer]) -> Tensor:
        """Return how many sampled codes moved, and how many are at an end."""
        fields = coded(self.variant, owner)
        limits = ends(self.pair, self.variant, owner)
        first = buffers[0]
        code, shift = first.entries, 0
        for field, one in zip(fields, buffers, strict=True) if any(f.per == EIGHT for f in fields) else ():
            width = field.width if field.per == EIGHT else 8
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)
            part = (one.entries[..., None] >> shifts & (1 << width) - 1).flatten(2) << shift
            code, shift = code | part if shift else part, shift + width
        if limits is None:
            moved = [code[0] != code[1]] if shift else [one.moved() for one in buffers]
            count = _count(functools.reduce(torch.logical_or, moved))
            return first.sum(count, torch.full_like(count, -1))
        if owner not in self._ends:  # rows: a comparison with a number takes ten times as long
            rows = torch.tensor(limits, dtype=torch.uint8, device="cpu")[:, None].expand(2, RUN)
            self._ends[owner] = sent(rows.contiguous(), code.device)
        at_end = _count((code[1] == self._ends[owner][0]) | (code[1] == self._ends[owner][1]))
        if 0 in limits:  # where nothing was sampled
            lacking = [-n % RUN for n in first.sampled]
            beside = sent(torch.tensor([[0.0, float(n)] for n in lacking], device="cpu"), code.device)
            return first.sum(_count(code[0] != code[1]), at_end) - beside
        return first.sum(_count(code[0] != code[1]), at_end)

    def rows(self, sums: list[list[float]]) -> dict[str, Numbers]:
        """Return the numbers of each parameter, by name."""
        made: dict[str, Numbers] = {}
        for k, (name, (*found, largest)) in enumerate(zip(self.names, sums, strict=True)):
            n = self.weight[0].sampled[k]
            weight, gradient, update, dot, bad_g, bad_w, moved = found[:7]
            up = self.numel[k] / n
            row = {
                "weight_norm": math.sqrt(weight * up), "gradient_norm": math.sqrt(gradient * up),
                "update_norm": math.sqrt(update * up), "cosine": _over(-dot, math.sqrt(gradient * update)),
                "ratio": math.sqrt(_over(update, weight)), "largest_ratio": largest, "nonfinite_gradients": bad_g,
                "nonfinite_weights": bad_w, "weight_still": 1 - moved / n,
            }  # fmt: skip
            for j, (owner, buffers) in enumerate(self.states.items()):
                own, at_end = buffers[0].sampled[k], found[8 + 2 * j]
                row[f"{owner}_still"] = 1 - found[7 + 2 * j] / own
                if at_end >= 0:
                    row[f"{owner}_at_end"] = at_end / own
            made[name] = {**row, "elements": self.numel[k], "sampled": n}
        return made


def _same(a: list[object], b: list[object]) -> bool:
    """Return True if both list the same tensors and equal other things."""
    return len(a) == len(b) and all(x is y or (not isinstance(x, Tensor) and x == y) for x, y in zip(a, b, strict=True))


def _count(x: Tensor) -> Tensor:
    """Count what is true in each row; torch.count_nonzero takes twice as long."""
    return x.view(torch.uint8).sum(1, dtype=torch.int32)


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


class Sampled(NamedTuple):
    """The parts on this rank of a parameter, its gradient and its state."""

    name: Label
    p: Tensor
    g: Tensor
    kept: Mapping[str, Any]


class Pending(NamedTuple):
    """Sums on their way to the host.  events: one of each device that they come from."""

    step: int
    tables: list[WatchTable]
    sums: list[Tensor]
    events: list[Any]


class Known(NamedTuple):
    """The tables of some parameters, valid while `signature` is unchanged; parameters are held, states are not.

    rows  the positions in the list of parameters, for each table
    """

    signature: list[object]
    tables: list[WatchTable]
    rows: list[list[int]]


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
        self._tables: list[WatchTable] = []
        self._known: dict[int | None, Known] = {}
        self._pending: list[Pending] = []

    def begin(self, owner: Owner, only: Iterable[Entry] | None = None) -> list[WatchTable]:
        """Sample parameters before their step, if it is a watched one; `only`: of released gradients, these alone."""
        if self.step < 0:  # the host waits here, once
            begun = (state.of(owner.states, entry.p) for entry in entries.of(owner.groups))
            self.step = max((state.step_count(one["step"]) or 0 for one in begun if one), default=0)
        if (self.step + 1) % self.every:
            return []
        if counting.capturing():
            raise RuntimeError(
                f"{owner.cls.__name__}.watch: a CUDA graph is being captured, which would repeat one measurement into "
                f"the same memory: call remove() on what watch() returned before the capture"
            )
        listed: list[tuple[Entry, Sampled]] = []
        signature: list[object] = []
        for entry in entries.of(owner.groups) if only is None else only:
            p, g, kept = entry.p, entry.p.grad, state.of(owner.states, entry.p)
            if g is None or not kept:  # a first step makes the state
                continue
            if type(p) is not torch.nn.Parameter:
                p, g, kept = sharding.local(p), sharding.local(g), sharding.locals_of(kept)
            if not p.numel() or g.layout is not torch.strided or g.shape != p.shape:  # what does not fit, the step says
                continue
            listed.append((entry, Sampled(entry.name, p, state.materialized(g), kept)))
            signature += [entry.p, (entry.name, p.shape, g.dtype, *kept)]
        if not listed:
            return []
        with torch.no_grad():
            key = None if only is None else id(listed[0][0].p)
            known = self._known.get(key)
            if known is None or not _same(known.signature, signature):
                known = self._known[key] = self._sort(owner, listed, signature)
            for table, rows in zip(known.tables, known.rows, strict=True):
                table.begin([listed[k][1] for k in rows], self.turn)
        return known.tables

    def _sort(self, owner: Owner, listed: list[tuple[Entry, Sampled]], signature: list[object]) -> Known:
        """Make a table for the parameters that are stored alike."""
        alike: dict[object, tuple[Pair, Variant, list[int]]] = {}
        for k, (entry, one) in enumerate(listed):
            group = owner.groups[entry.number]
            _, pair, variant = checkpoint.select(owner.cls, group, entry.p, entry.name, one.kept)
            alike.setdefault((pair.name, id(variant), one.p.device, one.g.dtype), (pair, variant, []))[2].append(k)
        tables = [WatchTable(pair, v, [listed[k][1] for k in rows], self.sample) for pair, v, rows in alike.values()]
        return Known(signature, tables, [rows for *_, rows in alike.values()])

    def end(self, tables: list[WatchTable]) -> None:
        """Sample parameters after their step."""
        with torch.no_grad():
            for table in tables:
                table.end()
        self._tables += tables

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
            rows |= table.rows(sums.tolist())
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


class Watches:
    """The recorders of an optimizer of several rules; also a context manager, which removes them at its end."""

    def __init__(self, parts: list[Watch]) -> None:
        self.parts = parts

    def flush(self) -> None:
        """Wait for numbers that are on their way, and hand them over."""
        for part in self.parts:
            part.flush()

    def remove(self) -> None:
        """Hand over what is on its way, and end the measurements."""
        for part in self.parts:
            part.remove()

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
    is watched already.
    """
    if self._watch is not None:
        raise RuntimeError(f"{type(self).__name__}.watch: it is watched already; remove() that watch first")
    self._watch = made = Watch(self, to, every, sample)
    return made
