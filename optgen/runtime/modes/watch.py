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
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
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
    @functools.lru_cache(maxsize=4096)
    def of(cls, entries: int, sample: int, width: int) -> Spots:
        run, most = RUN * width // EIGHT, sample * width // EIGHT
        if entries <= max(most, run):
            return cls((1, entries), (entries, 1), 0, 1)
        count, units = max(1, most // run), entries // width
        stride = units // count
        moves = units - (count - 1) * stride - run // width + 1
        step = next(s for s in range(run // width, 0, -1) if math.gcd(s, moves) == 1)  # so that every place is reached
        return cls((count, run), (stride * width, 1), step * width, moves * width)

    def view(self, t: Tensor, turn: int) -> Tensor:
        """Return the view at a watched step."""
        if not t.is_contiguous() or t.is_neg():
            t = t.resolve_neg().contiguous()
        if not self.step:
            return t.view(self.size)
        return t.as_strided(self.size, self.strides, t.storage_offset() + turn * self.step % self.moves)


class Runs(NamedTuple):
    """The runs of RUN elements in which the samples of some tensors are, one tensor after the other.

    tensors  how many they are
    owners   int64 (runs): the index of the tensor
    inside   bool (runs, RUN): False behind the last element of a tensor
    """

    tensors: int
    owners: Tensor
    inside: Tensor

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, counts: tuple[int, ...], device: torch.device) -> Runs:
        """Return those of tensors with so many sampled elements."""
        owners = torch.tensor([k for k, n in enumerate(counts) for _ in range(0, n, RUN)], device="cpu")
        left = torch.tensor([n - start for n in counts for start in range(0, n, RUN)], device="cpu")
        inside = torch.arange(RUN, device="cpu") < left[:, None]
        return cls(len(counts), sent(owners, device), sent(inside, device))

    def sum(self, *columns: Tensor) -> Tensor:
        """Return the sums (tensors, columns) of values (runs)."""
        values = torch.stack([column.to(torch.float32) for column in columns], 1)
        return values.new_zeros((self.tensors, len(columns))).index_add_(0, self.owners, values)


@functools.lru_cache(maxsize=1024)
def coded(variant: Variant, owner: str) -> tuple[Field, ...]:
    """Return the fields of a state, or of "p", that have entries for each element."""
    found = (f for f in variant.fields if f.owner == owner and f.space == "elem" and not f.part)
    return tuple(f for f in found if f.per == 1 or f.per == EIGHT)


class Sampled(NamedTuple):
    """The parts on this rank of a parameter, its gradient and its state."""

    name: Label
    p: Tensor
    g: Tensor
    kept: Mapping[str, Any]


class WatchTable:
    """The measurements of parameters that are stored alike, around one step.

    before, after  sampled elements (runs, RUN) of the weights ("p") and of each field, by name
    counts         numbers of elements that were sampled of each parameter, likewise
    """

    def __init__(self, pair: Pair, variant: Variant, found: Sequence[Sampled], sample: int, turn: int) -> None:
        self.pair, self.variant, self.found, self.sample, self.turn = pair, variant, found, sample, turn
        self.device, self.counts = found[0].p.device, dict[str, tuple[int, ...]]()
        self.states = {owner: fields for owner in variant.states if (fields := coded(variant, owner))}
        self.fields = [*coded(variant, "p"), *(f for fields in self.states.values() for f in fields)]
        self.gradient = self._elements("gradient", [one.g for one in found])
        self.before, self.after = self._read(), dict[str, Tensor]()

    def _read(self) -> dict[str, Tensor]:
        read = {"p": self._elements("p", [one.p for one in self.found])}
        return read | {f.name: self._elements(f.name, [one.kept[f.name] for one in self.found], f) for f in self.fields}

    def _elements(self, name: str, tensors: Iterable[Tensor], field: Field | None = None) -> Tensor:
        """Copy the sampled elements of tensors; zeros fill the last run of each."""
        width = EIGHT if field is None or field.per != EIGHT else field.width
        run, parts, counts = RUN * width // EIGHT, list[Tensor](), list[int]()
        for t in tensors:
            spots = Spots.of(t.numel(), self.sample, width)
            part, n = spots.view(t, self.turn), spots.size[0] * spots.size[1]
            counts.append(n * EIGHT // width)
            if not spots.step:  # the whole tensor
                part = (nn.functional.pad(part, (0, -n % run)) if n % run else part).view(-1, run)
            parts.append(part)
        self.counts[name], found = tuple(counts), torch.cat(parts)
        if width == EIGHT:
            return found
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=self.device)
        return (found[..., None] >> shifts & (1 << width) - 1).flatten(1)

    def end(self) -> None:
        """Sample weights and states after the step."""
        self.after = self._read()

    def _weight(self, elements: Mapping[str, Tensor]) -> Tensor:
        """Return full weights, 0 behind the last element of a tensor."""
        stored = [elements[name] for name in ("p", *(f.name for f in coded(self.variant, "p")))]
        found = plans.storage(self.pair, self.variant).weight([x.flatten() for x in stored])
        return found.view(stored[0].shape).where(Runs.of(self.counts["p"], self.device).inside, 0.0)

    def _moved(self, names: Iterable[str]) -> Tensor:
        """Count in each run the elements that have other bits than before the step."""
        moved: list[Tensor] = []
        for name in names:
            integers = _INTEGERS[self.before[name].element_size()]
            moved.append(self.before[name].view(integers) != self.after[name].view(integers))
        found = functools.reduce(torch.logical_or, moved)
        return found.view(torch.uint8).sum(1, dtype=torch.int32)  # torch.count_nonzero takes twice as long

    def reduce(self) -> Tensor:
        """Return the sums of each parameter: fp32 (parameters, 7 and one for each state, and the largest ratio)."""
        before, after = self._weight(self.before), self._weight(self.after)
        g, update, runs = self.gradient.to(torch.float32), after - before, Runs.of(self.counts["p"], self.device)
        ratio = (update / after).abs_().nan_to_num_(nan=0.0, posinf=math.inf).amax(1)  # 0 where both are 0
        largest = ratio.new_zeros(len(self.found)).scatter_reduce_(0, runs.owners, ratio, "amax")
        found = runs.sum(
            *(torch.linalg.vector_norm(x, dim=1).square() for x in (after, g, update)), (g * update).sum(1),
            *((x * 0).nan_to_num_(nan=1.0).sum(1) for x in (g, after)),
            self._moved(("p", *(f.name for f in coded(self.variant, "p")))),
        )  # fmt: skip
        still = [
            Runs.of(self.counts[fields[0].name], self.device).sum(self._moved(f.name for f in fields))
            for fields in self.states.values()
        ]
        return torch.cat([found, *still, largest[:, None]], 1)

    def rows(self, sums: list[list[float]]) -> dict[str, Numbers]:
        """Return the numbers of each parameter, by name."""
        made: dict[str, Numbers] = {}
        for k, (one, (*found, largest)) in enumerate(zip(self.found, sums, strict=True)):
            n, numel = self.counts["p"][k], one.p.numel()
            weight, gradient, update, dot, bad_g, bad_w, moved = found[:7]
            row = {
                "weight_norm": math.sqrt(weight * numel / n), "gradient_norm": math.sqrt(gradient * numel / n),
                "update_norm": math.sqrt(update * numel / n), "cosine": _over(-dot, math.sqrt(gradient * update)),
                "ratio": math.sqrt(_over(update, weight)), "largest_ratio": largest, "nonfinite_gradients": bad_g,
                "nonfinite_weights": bad_w, "weight_still": 1 - moved / n,
            }  # fmt: skip
            for (owner, fields), changed in zip(self.states.items(), found[7:], strict=True):
                row[f"{owner}_still"] = 1 - changed / self.counts[fields[0].name][k]
            made[str(one.name)] = {**row, "elements": numel, "sampled": n}
        return made


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


class Pending(NamedTuple):
    """Sums on their way to the host.  events: one of each device that they come from."""

    step: int
    tables: list[WatchTable]
    sums: list[Tensor]
    events: list[Any]


class Watch(AbstractContextManager["Watch"]):
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
        alike: dict[object, tuple[Pair, Variant, list[Sampled]]] = {}
        with torch.no_grad():
            for entry in entries.of(owner.groups) if only is None else only:
                if (one := _sampled(owner, entry)) is not None:
                    group = owner.groups[entry.number]
                    _, pair, v = checkpoint.select(owner.cls, group, entry.p, entry.name, one.kept)
                    alike.setdefault((pair.name, id(v), one.p.device, one.g.dtype), (pair, v, []))[2].append(one)
            return [WatchTable(*stored, self.sample, self.turn) for stored in alike.values()]

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

    def __exit__(self, *error: object) -> None:
        self.remove()


class Watches(AbstractContextManager["Watches"]):
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

    def __exit__(self, *error: object) -> None:
        self.remove()


def _sampled(owner: Owner, entry: Entry) -> Sampled | None:
    """Return what is measured of a parameter; None if it has no state yet, or the step refuses it."""
    p, g, kept = entry.p, entry.p.grad, state.of(owner.states, entry.p)
    if g is None or not kept:  # a first step makes the state
        return None
    if type(p) is not nn.Parameter:
        p, g, kept = sharding.local(p), sharding.local(g), sharding.locals_of(kept)
    if not p.numel() or g.layout is not torch.strided or g.shape != p.shape:  # what does not fit, the step says
        return None
    return Sampled(entry.name, p, state.materialized(g), kept)


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
