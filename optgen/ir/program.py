"""The operations of one step (Program) and their order (Schedule).

A Program is a list of lets in the author's order and the stores at the end.  Because nodes are shared,
a let is no more than a name for a node: a backend that meets a node bound by an earlier let writes its
name.  All records are frozen; a pass returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from optgen.base.loc import Loc
from optgen.ir.node import Node, postorder
from optgen.ops import spaces
from optgen.ops.dtypes import DType
from optgen.ops.spaces import Space

Section = Literal["decode", "update", "encode"]
Role = Literal["param", "grad", "state", "weight", "temp", "partial", "value"]

GRAD_SCALE = "grad_scale"  # host scalar: -1 under maximize, 1 / loss scale under a GradScaler


@dataclass(frozen=True)
class Buffer:
    """One tensor that the kernel touches.

    name   the key in opt.state[p] ("exp_avg", "exp_avg_scale", "weight_low"), or "p" / "g"
    owner  the logical value that it stores part of: a state's name, "p" or "g"
    space  elem (shape of the parameter), block:B (shape (rows, ceil(columns / B))), or a small one: row (shape
           (..., rows, 1)), col (..., 1, columns), mat (..., 1, 1), tensor and model ()
    role   temp: an fp32 value that one stage leaves for the next ones of the same step; partial: the same, and what
           is stored there is reduced on the way; value: of a codec alone, the number that it stores
    reduction   of a partial: how, for instance row_sum
    """

    name: str
    dtype: DType
    space: Space
    role: Role
    owner: str
    reads: bool = True
    writes: bool = True
    reduction: str = ""

    @property
    def bytes_per_param(self) -> float:
        if self.space.name in spaces.SMALL or self.role == "partial":
            return 0.0  # rows and columns are few beside elements
        return self.dtype.bytes / (self.space.size or 1)


@dataclass(frozen=True)
class Let:
    """A name for a node; `stage` is the block of the kernel it stands in, `loc` and `line` the author's."""

    name: str
    node: Node
    stage: Section = "update"
    loc: Loc | None = None
    line: str = ""  # the author's source line, stripped

    def of(self, node: Node) -> Let:
        """The same name for another node."""
        return self if node is self.node else Let(self.name, node, self.stage, self.loc, self.line)


@dataclass(frozen=True)
class Store:
    """`node`, already of the buffer's dtype, goes to `buffer`."""

    buffer: str
    node: Node


@dataclass(frozen=True)
class StateValue:
    """A logical value that is kept between steps: what reading it gives, and what the step makes of it.

    owner   a state's name, or "p"
    old     its value before the step, in terms of loads
    new     its value after the step, before it is encoded
    """

    owner: str
    old: Node
    new: Node


@dataclass(frozen=True)
class Program:
    name: str
    buffers: tuple[Buffer, ...]
    host: tuple[Let, ...]  # after hoist: host scalars that the kernel reads, in order; node in terms of hypers and step
    body: tuple[Let, ...]
    stores: tuple[Store, ...]
    maths: Literal["strict", "fast"] = "fast"
    block: int = 1  # the block size of the kernel's block space; 1 where nothing is stored in blocks
    rules: tuple[str, ...] = ()  # ROUNDS rules that fired, for the header
    hypers: tuple[str, ...] = ()  # scalar names that host lets may read, e.g. lr, beta1, beta2, step
    ranges: tuple[tuple[str, tuple[float, float]], ...] = ()  # closed intervals of those names
    host_locals: tuple[Let, ...] = ()  # the author's named host values, of which scalars are made
    host_states: tuple[tuple[str, float], ...] = ()  # (name, initial value) of per-parameter host scalars
    host_stores: tuple[Let, ...] = ()  # new values of the host states, host space
    kept: tuple[StateValue, ...] = ()  # of a whole step, before it is cut
    sums: tuple[Node, ...] = ()  # over the model, of a whole step: a parameter that does not use one is part of it
    together: tuple[tuple[str, str], ...] = ()  # owners that one sweep stores: one is kept relative to the other
    space: Space = spaces.elem  # whose entries the program runs over; a small one: work between two sweeps
    scalars: frozenset[str] = frozenset()  # names of the host scalars of all programs of the step

    @property
    def is_sized(self) -> bool:
        """True if it reads the number of rows, columns or elements of a tensor."""
        return any(n.op == "extent" for n in postorder(self.roots()))

    def buffer(self, name: str) -> Buffer:
        return {b.name: b for b in self.buffers}[name]

    def roots(self) -> list[Node]:
        return [let.node for let in self.body] + [s.node for s in self.stores] + list(self.sums)

    def map(self, f: Callable[[Node], Node]) -> Program:
        """The program with f applied to every let and store of the body, sum over the model and kept value."""
        body = tuple([let.of(f(let.node)) for let in self.body])
        stores = tuple([s if (new := f(s.node)) is s.node else Store(s.buffer, new) for s in self.stores])
        kept = tuple([replace(k, old=f(k.old), new=f(k.new)) for k in self.kept])
        return replace(self, body=body, stores=stores, sums=tuple(map(f, self.sums)), kept=kept)


@dataclass(frozen=True)
class Sweep:
    """One pass over the entries of a space."""

    reads: tuple[str, ...]
    lets: tuple[Let, ...]
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Schedule:
    """The work of one kernel: a program and the order of its lines."""

    program: Program
    sweep: Sweep

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes per parameter and step: (read, written)."""
        size = {b.name: b.bytes_per_param for b in self.program.buffers}
        return sum(size[name] for name in self.sweep.reads), sum(size[st.buffer] for st in self.sweep.stores)

    @property
    def partials(self) -> tuple[Buffer, ...]:
        """The buffers of partial sums (maxima) that the sweep leaves."""
        buffers = (self.program.buffer(s.buffer) for s in self.sweep.stores)
        return tuple(b for b in buffers if b.role == "partial")


@dataclass(frozen=True)
class Stage:
    """A kernel of a step that takes several, and why it cannot be part of the one before.

    scalars  which of the step's host scalars it takes, by position
    """

    schedule: Schedule
    why: str
    scalars: tuple[int, ...]

    @property
    def space(self) -> Space:
        return self.schedule.program.space

    @cached_property
    def call(self) -> str:
        """The function of whole matrices that the stage is, "whole" if it has several; "" for a kernel."""
        if self.space == spaces.whole:
            return "whole"
        names = (n.attr for n in postorder([s.node for s in self.schedule.sweep.stores]) if n.op == "call")
        return str(next(names, ""))

    @property
    def is_sweep(self) -> bool:
        return self.space == spaces.elem and not self.call


@dataclass(frozen=True)
class Step:
    """One optimizer step: the whole program, and the kernels that do it in their order.

    host    the scalars of all stages
    early   states whose new value is stored before the last sweep that needs it, and read back from there
    """

    program: Program
    stages: tuple[Stage, ...]
    host: tuple[Let, ...]
    host_locals: tuple[Let, ...] = ()
    early: tuple[str, ...] = ()

    @property
    def in_stages(self) -> bool:
        """True if its kernels are those of stages; else it is one kernel, which knows elements and blocks only."""
        few = any(b.space.name in spaces.SMALL for b in self.program.buffers)
        return len(self.stages) > 1 or few or any(s.schedule.program.is_sized for s in self.stages)

    @property
    def sweeps(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.stages if s.is_sweep)

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes per parameter and step: (read, written), over all sweeps."""
        each = [s.schedule.traffic for s in self.sweeps]
        return sum(r for r, _ in each), sum(w for _, w in each)

    @property
    def temps(self) -> tuple[Buffer, ...]:
        """The values that stages leave for later ones: those of a stage by their names."""
        buffers: dict[str, Buffer] = {}
        for s in self.stages:
            for b in sorted(s.schedule.program.buffers, key=lambda b: b.name):
                if b.role in ("temp", "partial") and (b.role == "partial" or b.name not in buffers):
                    buffers[b.name] = b
        return tuple(buffers.values())
