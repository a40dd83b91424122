"""What one step does (Program), and when (Schedule).

A Program is a list of lets in the author's order and the stores at the end.  Because nodes are shared,
a let is no more than a name for a node: a printer that meets a node bound by an earlier let writes its
name.  All records are frozen; a pass returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from optgen.base.loc import Loc
from optgen.ir.node import Node
from optgen.ops import spaces
from optgen.ops.dtypes import DType
from optgen.ops.spaces import Space

Stage = Literal["decode", "update", "encode"]
Role = Literal["param", "grad", "state", "weight"]


@dataclass(frozen=True)
class Buffer:
    """One tensor that the kernel touches.

    name   the key in opt.state[p] ("exp_avg", "exp_avg_scale", "weight_low"), or "p" / "g"
    owner  the logical value that it stores part of: a state's name, "p" or "g"
    space  elem (shape of the parameter) or block:B (shape (rows, ceil(columns / B)))
    """

    name: str
    dtype: DType
    space: Space
    role: Role
    owner: str
    reads: bool = True
    writes: bool = True

    @property
    def bytes_per_param(self) -> float:
        if self.space.rank < spaces.RANK["block"]:
            return 0.0  # rows and columns are few beside elements
        return self.dtype.bytes / (self.space.size or 1)


@dataclass(frozen=True)
class Let:
    """A name for a node; `stage` is the block of the kernel it stands in, `loc` and `line` the author's."""

    name: str
    node: Node
    stage: Stage = "update"
    loc: Loc | None = None
    line: str = ""  # the author's source line, stripped
    doc: str = ""  # a comment for lets that no author's line made


@dataclass(frozen=True)
class Store:
    """`node`, already of the buffer's dtype, goes to `buffer`."""

    buffer: str
    node: Node


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
    doc: str = ""
    host_locals: tuple[Let, ...] = ()  # the author's named host values, of which scalars are made
    host_states: tuple[tuple[str, float], ...] = ()  # (name, initial value) of per-parameter host scalars
    host_stores: tuple[Let, ...] = ()  # new values of the host states, host space

    def buffer(self, name: str) -> Buffer:
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    def roots(self) -> list[Node]:
        return [let.node for let in self.body] + [s.node for s in self.stores]

    def map(self, f: Callable[[Node], Node]) -> Program:
        """The program with f applied to every let and store of the body."""
        return replace(
            self,
            body=tuple(replace(let, node=f(let.node)) for let in self.body),
            stores=tuple(replace(s, node=f(s.node)) for s in self.stores),
        )


@dataclass(frozen=True)
class Partial:
    """A reduction that a sweep leaves for the next one: per work item, summed again in fixed order."""

    name: str
    reduction: str
    node: Node


@dataclass(frozen=True)
class Sweep:
    """One pass over the elements."""

    reads: tuple[str, ...]
    lets: tuple[Let, ...]
    partials: tuple[Partial, ...]
    stores: tuple[Store, ...]
    why: str = ""


@dataclass(frozen=True)
class Schedule:
    program: Program
    sweeps: tuple[Sweep, ...]
    epilogues: tuple[tuple[Let, ...], ...] = field(default=())  # small row/col/tensor work after each sweep

    @property
    def traffic(self) -> tuple[float, float]:
        """Bytes per parameter and step: (read, written), over all sweeps."""
        size = {b.name: b.bytes_per_param for b in self.program.buffers}
        read = sum(size[name] for s in self.sweeps for name in s.reads)
        written = sum(size[st.buffer] for s in self.sweeps for st in s.stores)
        return read, written
