"""The flight recorder: norms and shares of every tensor, measured around a step on a sample of its elements.

A watched step copies the sampled elements of weights, gradients and states, lets the very same kernels run, copies the
weights and states again, and reduces both in a few operations for all tensors that are stored alike.  Results are
summed on the device and copied to the host without waiting for it; they are handed over once they have arrived.

Tensors of at most `sample` elements are measured whole.  Of a larger one, runs of RUN elements at equal distances are;
they move on with every watched step, so that none stays unseen.  A norm is that of the sample times the square root of
(elements / sampled).
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import plans, sharding
from optgen.runtime.options import entries
from optgen.runtime.options.entries import Entry, Owner
from optgen.runtime.records import EIGHT, PACK, Field, Variant, as_int
from optgen.runtime.records.join import Pair
from optgen.runtime.reference.eager import Blocks
from optgen.runtime.reference.stored import FULL, Codec
from optgen.runtime.states import state
from optgen.runtime.work import counting

RUN = 256
"""Elements in a row that are sampled together, a multiple of EIGHT."""

SAMPLE = 4096
"""Elements of a tensor that are measured by default: the norm of normally distributed ones is then within 1.1 % (one
standard deviation, 1 / sqrt(2 * 4096))."""

Numbers = dict[str, float]
Callback = Callable[[int, dict[str, Numbers]], object]
"""(step, name of a tensor -> its numbers) -> ignored."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Spots(NamedTuple):
    """The sampled elements of a flat tensor: `count` runs of `length` elements, `stride` apart, from `start` on."""

    count: int
    length: int
    stride: int
    start: int

    @classmethod
    def of(cls, numel: int, sample: int, turn: int) -> Spots:
        if numel <= max(sample, RUN):
            return cls(1, numel, 0, 0)
        count = max(1, sample // RUN)
        stride = numel // count // EIGHT * EIGHT
        return cls(count, RUN, stride, turn * RUN % (stride - RUN + EIGHT))

    @property
    def runs(self) -> int:
        """Rows of RUN elements that they fill in a buffer."""
        return -(-self.count * self.length // RUN)

    def view(self, flat: Tensor, width: int = EIGHT) -> Tensor:
        """Return a view (count, length) of a flat tensor whose EIGHT elements have `width` entries."""
        count, *sizes = self
        length, stride, start = (size * width // EIGHT for size in sizes)
        return flat.as_strided((count, length), (stride, 1), flat.storage_offset() + start)


class Buffer:
    """The sampled entries of one kind of tensor, of all parameters of a table, before and after a step.

    entries  of dtype, (2, runs in all, RUN elements); `fill` where nothing was sampled
    owners   int64, (runs in all): the row of the table
    sampled  elements of each row
    once     whether they are sampled before the step only
    """

    def __init__(self, tensors: list[Tensor], spots: list[Spots], device: torch.device, width: int = EIGHT, fill: float = 0, once: bool = False) -> None:
        runs, self.once = [one.runs for one in spots], once
        self.sampled = [one.count * one.length for one in spots]
        shape, kind = (2 - once, sum(runs), RUN * width // EIGHT), tensors[0].dtype
        self.entries = torch.full(shape, fill, dtype=kind, device=device)
        self.owners = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).to(device, non_blocking=True)
        self.sources = [one.view(flat, width) for one, flat in zip(spots, tensors, strict=True)]
        self._targets: list[list[Tensor]] = []
        for half in self.entries.flatten(1).unbind():
            start, found = 0, []
            for one, source in zip(spots, self.sources, strict=True):
                found.append(half[start : start + source.numel()].view(source.shape))
                start += one.runs * self.entries.shape[2]
            self._targets.append(found)

    def take(self, after: int) -> None:
        """Copy what the tensors hold now to the entries before (0) or after (1) the step; then they are let go."""
        torch._foreach_copy_(self._targets[after], self.sources)
        if after or self.once:
            self.sources, self._targets = [], []

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
    """Return the codes of a state's smallest and largest finite value; None if it has no codes, or scales of a whole
    tensor."""
    codes = coded(variant, owner)
    codec = codec_of(pair, variant, owner)
    if not codes or codec.whole or any(f.torch_dtype is not torch.uint8 for f in codes):
        return None
    bits = sum(f.width if f.per == EIGHT else 8 for f in codes)
    x = torch.linspace(0.5, 1.0, max(2**bits, codec.block))[None]
    b, every = Blocks(x, max(codec.block, PACK if codec.packed else 1)), torch.arange(x.numel()) % 2**bits
    fields, shift = list(codec.nearest(b, b.elements(x))), 0
    for k, name in enumerate(variant.owned(owner)):
        field = next((f for f in codes if f.name == name), None)
        if field is not None:
            width = field.width if field.per == EIGHT else 8
            part = (every >> shift & (1 << width) - 1).to(torch.uint8)[None]
            fields[k] = part if field.per == 1 else b.flat_codes(b.elements(part), width)
            shift += width
    values = b.flat(codec.decode(b, *fields[: len(variant.owned(owner))])).flatten()[: 2**bits]
    finite = values.isfinite()
    low = torch.where(finite, values, math.inf).argmin()
    return int(low), int(torch.where(finite, values, -math.inf).argmax())


def codec_of(pair: Pair, variant: Variant, owner: str) -> Codec:
    """Return the codec of a state, or of the weight "p"."""
    name = variant.eager.codecs.get(owner, "")
    found: Codec = getattr(plans.reference(pair, variant).codecs, name) if name else FULL
    return found


@functools.lru_cache(maxsize=1024)
def coded(variant: Variant, owner: str) -> tuple[Field, ...]:
    """Return the fields of a state, or of "p", that have entries for each element."""
    found = (f for f in variant.fields if f.owner == owner and f.space == "elem" and not f.part)
    return tuple(f for f in found if f.per == 1 or f.per == EIGHT)


class Table:
    """The measurements of parameters that are stored alike, around one step."""

    def __init__(self, pair: Pair, variant: Variant, found: list[tuple[Entry, Tensor, Tensor, Any]], watch: Watch):
        self.pair, self.variant = pair, variant
        self.names = [str(entry.name) for entry, *_ in found]
        self.numel = [p.numel() for _, p, _, _ in found]
        device = found[0][1].device

        def buffer(tensors: list[Tensor], width: int = EIGHT, **options: Any) -> Buffer:
            flat = [_flat(t) for t in tensors]
            spots = [Spots.of(t.numel() // width * EIGHT if width < EIGHT else t.numel(), watch.sample, watch.turn)
                     for t in flat]  # fmt: skip
            return Buffer(flat, spots, device, width, **options)

        self.weight = [buffer([p for _, p, _, _ in found])]
        self.gradient = buffer([g for *_, g, _ in found], once=True)
        kept = [one for *_, one in found]
        self.weight += [buffer([one[f.name] for one in kept], fill=f.zero) for f in coded(variant, "p")]
        self.states = {
            owner: [buffer([one[f.name] for one in kept], f.width if f.per == EIGHT else EIGHT) for f in of]
            for owner in variant.states
            if (of := coded(variant, owner))
        }
        self.gradient.take(0)
        self.take(0)

    def take(self, after: int) -> None:
        for buffers in (self.weight, *self.states.values()):
            for one in buffers:
                one.take(after)

    def reduce(self) -> Tensor:
        """Return the sums of each parameter: fp32 (parameters, 7 and 2 for each state)."""
        plain = self.weight[0]
        parts = [one.entries.flatten() for one in self.weight]
        decode = codec_of(self.pair, self.variant, "p").decode
        before, after = decode(Blocks(parts[0], 1), *parts).view(plain.entries.shape).unbind()
        g = self.gradient.entries[0].to(torch.float32)
        update = after - before
        ratio = (update / after).abs_().nan_to_num_(nan=0.0, posinf=math.inf).amax(1)
        largest = ratio.new_zeros(len(self.names)).scatter_reduce_(0, plain.owners, ratio, "amax")
        moved = functools.reduce(torch.logical_or, [one.moved() for one in self.weight])
        found = plain.sum(
            *(torch.linalg.vector_norm(x, dim=1).square() for x in (after, g, update)), (g * update).sum(1),
            torch.count_nonzero(g * 0, 1), torch.count_nonzero(after * 0, 1), torch.count_nonzero(moved, 1),
        )  # fmt: skip
        return torch.cat([found, *(self._of_state(*one) for one in self.states.items()), largest[:, None]], 1)

    def _of_state(self, owner: str, buffers: list[Buffer]) -> Tensor:
        """Return how many sampled codes moved, and how many are at an end."""
        fields = coded(self.variant, owner)
        limits = ends(self.pair, self.variant, owner)
        first = buffers[0]
        if limits is None:
            moved = functools.reduce(torch.logical_or, [one.moved() for one in buffers])
            count = torch.count_nonzero(moved, 1)
            return first.sum(count, torch.full_like(count, -1))
        code, shift = torch.zeros((2, *first.owners.shape, RUN), dtype=torch.uint8, device=first.owners.device), 0
        for field, one in zip(fields, buffers, strict=True):
            width = field.width if field.per == EIGHT else 8
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=code.device)
            code |= (one.entries[..., None] >> shifts & (1 << width) - 1).flatten(2) << shift
            shift += width
        at_end = torch.count_nonzero((code[1] == limits[0]) | (code[1] == limits[1]), 1)
        if 0 in limits:  # where nothing was sampled
            lacking = [one * RUN - n for one, n in zip(self._runs(first), first.sampled, strict=True)]
            beside = torch.tensor([[0.0, float(n)] for n in lacking]).to(code.device, non_blocking=True)
            return first.sum(torch.count_nonzero(code[0] != code[1], 1), at_end) - beside
        return first.sum(torch.count_nonzero(code[0] != code[1], 1), at_end)

    @staticmethod
    def _runs(buffer: Buffer) -> list[int]:
        return [-(-n // RUN) for n in buffer.sampled]

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


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


def _flat(t: Tensor) -> Tensor:
    return t.detach().resolve_neg().reshape(-1)


class Pending(NamedTuple):
    """Sums on their way to the host.  event: of the device, None if they are there."""

    step: int
    tables: list[Table]
    sums: list[Tensor]
    event: Any


class Watch:
    """The flight recorder of one optimizer, until `remove()`; also a context manager, which removes it at its end.

    every   steps from one watched step to the next; the watched ones are its multiples
    sample  elements of each tensor that are measured at most, or their runs; math.inf for all
    """

    def __init__(self, owner: Any, to: Callback | str, every: int, path: Any, sample: float) -> None:
        name, count = f"{type(owner).__name__}.watch", as_int(every)
        if count is None or count < 1 or isinstance(every, bool):
            raise ValueError(f"{name}: every must be a whole number of steps >= 1, got {every!r}")
        if isinstance(sample, bool) or not sample >= RUN:
            raise ValueError(f"{name}: sample must be a number of elements >= {RUN}, or math.inf, got {sample!r}")
        self.every, self.sample = count, int(sample) if math.isfinite(sample) else 2**62
        self.turn, self.step = 0, -1
        self._owner, self._to, self._close = owner, *sink(name, to, path)
        self._tables: list[Table] = []
        self._pending: list[Pending] = []

    def begin(self, owner: Owner, only: Iterable[Entry] | None = None) -> list[Table]:
        """Sample parameters before their step, if it is a watched one; `only`: of released gradients, these alone."""
        if self.step < 0:  # the host waits here, once
            kept = (state.of(owner.states, entry.p) for entry in entries.of(owner.groups))
            self.step = max((state.step_count(one["step"]) or 0 for one in kept if one), default=0)
        if (self.step + 1) % self.every:
            return []
        if counting.capturing():
            raise RuntimeError(
                f"{owner.cls.__name__}.watch: a CUDA graph is being captured, which would repeat one measurement into "
                f"the same memory: call remove() on what watch() returned before the capture"
            )
        alike: dict[object, tuple[Pair, Variant, list[tuple[Entry, Tensor, Tensor, Any]]]] = {}
        for entry in entries.of(owner.groups) if only is None else only:
            p, g, kept = sharding.local(entry.p), sharding.local(entry.p.grad), state.of(owner.states, entry.p)
            if g is None or not kept or not p.numel() or g.layout is not torch.strided or g.shape != p.shape:
                continue  # its first step makes its state; what else does not fit, the step refuses
            _, pair, variant = checkpoint.select(owner.cls, owner.groups[entry.number], entry.p, entry.name, kept)
            here = sharding.locals_of(kept)
            key = pair.name, id(variant), p.device, p.dtype, g.dtype, *(here[f.name].dtype for f in variant.fields)
            alike.setdefault(key, (pair, variant, []))[2].append((entry, p, state.materialized(g), here))
        with torch.no_grad():
            return [Table(pair, variant, found, self) for pair, variant, found in alike.values()]

    def end(self, tables: list[Table]) -> None:
        """Sample parameters after their step."""
        with torch.no_grad():
            for table in tables:
                table.take(1)
        self._tables += tables

    @_disable_dynamo
    def finish(self) -> None:
        """End a step of the optimizer: start the copies of its numbers to the host, and hand over those that came."""
        self.step += self.step >= 0
        if self._tables:
            with torch.no_grad():
                sums = [table.reduce() for table in self._tables]
            there, event = any(x.is_cuda for x in sums), None
            if there:
                sums = [torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in sums]
                event = torch.cuda.current_stream(self._tables[0].gradient.entries.device).record_event()
            self._pending.append(Pending(self.step, self._tables, sums, event))
            self._tables, self.turn = [], self.turn + 1
        while self._pending and (self._pending[0].event is None or self._pending[0].event.query()):
            self._hand_over(self._pending.pop(0))

    def _hand_over(self, one: Pending) -> None:
        if one.event is not None:
            one.event.synchronize()
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
            self._close()

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


def sink(name: str, to: Callback | str, path: Any) -> tuple[Callback, Callable[[], object]]:
    """Return the function that takes the numbers, and the one that ends it.

    Raises ValueError for an unknown name or a missing path, ImportError if TensorBoard is not installed.
    """
    if callable(to):
        if path is not None:
            raise ValueError(f'{name}: path= is for to="tensorboard" and to="jsonl"; a function writes where it likes')
        return to, lambda: None
    if to == "jsonl" and path is not None:
        file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        return functools.partial(_write_lines, file), file.close
    if to == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            how = "pip install tensorboard"
            raise ImportError(f'{name}: to="tensorboard" needs the package tensorboard: {how}') from error
        writer: Any = SummaryWriter(None if path is None else os.fspath(path))  # type: ignore[no-untyped-call]
        return functools.partial(_write_scalars, writer), writer.close
    lacks = "to=\"jsonl\" needs path=, the file that lines are appended to" if to == "jsonl" else (
        f'to must be a function of (step, numbers by name), "tensorboard" or "jsonl", got {to!r}'
    )  # fmt: skip
    raise ValueError(f"{name}: {lacks}")


def _write_lines(file: Any, step: int, rows: Mapping[str, Numbers]) -> None:
    """Append a line for each tensor; null stands for what is no finite number."""
    for name, row in rows.items():
        numbers = {key: value if math.isfinite(value) else None for key, value in row.items()}
        file.write(json.dumps({"step": step, "name": name, **numbers}) + "\n")


def _write_scalars(writer: Any, step: int, rows: Mapping[str, Numbers]) -> None:
    """Add a scalar "number/tensor" for each number: TensorBoard puts one number of all tensors in one section."""
    for name, row in rows.items():
        for key, value in row.items():
            writer.add_scalar(f"{key}/{name}", value, step)
