"""Triton kernels of a step that takes several sweeps, and of what is done between them with few values.

A sweep that touches neither rows, columns nor matrices walks the tiles of segments, as a step of one sweep does (see
triton.py).  Any other comes as two kernels over one tile function:

    <name>        tensors whose blocks lie in rows of their matrices: all of at most two dimensions, others where rows
                  are whole blocks.  A work item is a panel of columns and 64 rows of a matrix; a tile is a few of these
                  rows, done in parts of 8 columns for each thread.  Sums of columns stay in the registers of the
                  threads that hold the columns, those of rows cross threads once for all parts.  A panel is W columns:
                  16 storage blocks, or 1024 where nothing is stored in blocks.
    <name>_flat   any tensor.  Blocks lie along dimension 0 against the rest, and may straddle rows and matrices: tiles
                  of blocks gather the values of their rows and columns, and the operands of reductions are stored
                  densely, for kernels of optgen.runtime.gpu.prelude to add up.

Both leave partial results, of which those kernels make sums.  Between two sweeps stands one kernel for all small work
of that level: a program takes matrices of one tensor through its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optgen.backends.printer import ATOM, with_comments
from optgen.backends.reference import bound_lines
from optgen.backends.triton import (
    ENTRY,
    Table,
    Term,
    TritonPrinter,
    anchor_of,
    extents,
    folded,
    headed,
    helpers,
    in_memory,
    is_packed,
    kernel,
    registers,
    scalars,
    sweep,
    sweep_tile,
    terms,
    tile,
    tl_dtype,
    walked,
    wrapped,
)
from optgen.ir.node import Node, postorder
from optgen.ir.program import Program, Schedule, Stage, Step
from optgen.ops import spaces
from optgen.ops.prims import GATHERS


def panel_columns(block: int) -> int:
    """Columns of a panel; see optgen.runtime.records.sums."""
    return 1024 if block == 1 else 16 * block


class SmallPrinter(TritonPrinter):
    """A printer of sweeps that touch rows and columns: all values have as many dimensions as the elements."""

    keeps = True


ONE = (spaces.tensor, spaces.model)
"""Spaces of one value in every tensor's room: what is summed over the model, the host adds up."""


def touches_matrices(program: Program) -> bool:
    """Return True if a sweep reads or reduces values of rows, columns or matrices."""
    return any(b.space.name in ("row", "col", "mat") for b in program.buffers)


@dataclass(frozen=True)
class Frame:
    """The table of a step (see optgen.runtime.step.launch.stage_rows); behind it come the addresses of dense operands.

    values    the entries with addresses of what is kept from step to step and of temps
    partials  of what sweeps reduce: the entries with addresses of the partial results
    numbers   of tables of numbers in memory: the entries with their addresses
    axes      whether the address of what columns are made of comes next
    matrices  the entry that is the number of matrices; rows and columns follow, then what triton.Table says
    dense     how many dense operands the widest sweep has
    """

    values: dict[str, int]
    partials: dict[str, int]
    numbers: dict[str, int]
    axes: bool
    matrices: int
    dense: int

    @classmethod
    def of(cls, step: Step) -> Frame:
        """The frame of a step."""
        names = [*(b.name for b in step.program.buffers), *(b.name for b in step.temps)]
        reduced = {b.name for s in step.sweeps for b in s.schedule.partials}
        partials = [b.name for b in step.temps if b.name in reduced]
        values = {name: i for i, name in enumerate(names)}
        after = {name: len(names) + i for i, name in enumerate(partials)}
        dense = max((len(terms(s.schedule)) for s in step.sweeps if touches_matrices(s.schedule.program)), default=0)
        axes = any(b.space == spaces.axis for b in step.program.buffers)
        count = len(names) + len(partials)
        tables = in_memory([s.schedule.program for s in step.stages if not s.call])
        numbers = {name: count + i for i, name in enumerate(tables)}
        return cls(values, after, numbers, axes, count + len(numbers) + axes, dense)

    @property
    def numel(self) -> int:
        return self.matrices + 3

    @property
    def width(self) -> int:
        return self.numel + 9 + self.dense

    def table(self, program: Program) -> Table:
        """Return the names that a stage reads: of a reduction of elements, the partial results."""
        sweep = program.space == spaces.elem
        where = {
            b.name: self.partials[b.name] if sweep and b.role == "partial" else self.values[b.name]
            for b in program.buffers
        }
        return Table(self.width, where, self.numel, self.numbers)


@dataclass(frozen=True)
class Kernels:
    """The printed kernels of a step.

    lines     their text
    tiles     flat sweep -> elements per tile
    limits    sweep -> registers per thread that it need not exceed
    warps     sweep over panels -> warps of 32 lanes per program
    dense     sweep over panels -> which dense operand each reduction's is
    """

    lines: list[str]
    tiles: dict[str, int]
    limits: dict[str, int | None]
    warps: dict[str, int]
    dense: dict[str, dict[str, int]]


def kernels(step: Step, function: str, source: str = "") -> Kernels:
    """All kernels of a step; stage k is <function>_<k>, small work is named after its level's first stage."""
    frame, out = Frame.of(step), Kernels([], {}, {}, {}, {})
    for k, stage in enumerate(step.stages):
        name, program = f"{function}_{k + 1}", stage.schedule.program
        if stage.call:
            continue
        first = k == 0 or step.stages[k - 1].level != stage.level
        if stage.is_sweep and touches_matrices(program):
            lines = _panels(stage.schedule, name, frame, source)
            out.warps[name] = _warps(program)
            out.limits[name] = _registers(stage.schedule)
            found = terms(stage.schedule)
            out.dense[name] = {b.name: i for i, t in enumerate(found) for b in t.partials}
        elif stage.is_sweep:
            lines = kernel(stage.schedule, name, source, frame.table(program))
            out.tiles[name] = sweep_tile(stage.schedule)
            out.limits[name] = registers(stage.schedule)
        elif first:
            level = [(f"{function}_{i + 1}", s) for i, s in _of_level(step, stage.level)]
            lines = _between(level, name, frame)
        else:
            continue
        out.lines.extend([*([""] * 2 if out.lines else []), *lines])
    return out


def _of_level(step: Step, level: int) -> list[tuple[int, Stage]]:
    """The kernels of a level, by their number."""
    return [(i, s) for i, s in enumerate(step.stages) if s.level == level and not s.call]


def needs(step: Step) -> list[str]:
    """Names to import from optgen.runtime.gpu.prelude."""
    names = set(helpers([s.schedule for s in step.stages if not s.call]))
    strict = step.program.maths == "strict"
    for s in step.stages:
        if s.is_sweep and touches_matrices(s.schedule.program):
            names |= {"within"} if anchor_of(s.schedule) else set()
        elif not s.is_sweep and not s.call:
            names.add("pointer")
            names |= {n.op for n in postorder(s.schedule.program.roots()) if n.op in GATHERS}
            for t in terms(s.schedule):
                names |= {"term"} | ({"down", "fold"} if strict or t.is_max else set())
    return sorted(names)


def _warps(program: Program) -> int:
    """Warps that share a row of a panel: what crosses threads once per row is worth 32 elements of each."""
    return min(max(panel_columns(program.block) // 1024, 1), 32)  # no device runs more together


def _registers(schedule: Schedule) -> int | None:
    """Registers per thread that a panel's kernel fits in, counted on sm_80 to sm_100: compilers left alone begin all
    parts of a row at a time where one term and one state's codes are all that is kept."""
    buffers = schedule.program.buffers
    states = {b.owner for b in buffers if b.role == "state" and b.writes}
    few = schedule.program.maths == "fast" and len(terms(schedule)) == 1 and len(states) == 1
    return 128 if few and schedule.program.block > 1 else None


def _part(program: Program) -> int:
    """Columns of a panel that a row's tile does at a time: 8 for each thread, in whole blocks."""
    return min(max(256 * _warps(program), program.block), panel_columns(program.block))


# Sweeps over panels ---------------------------------------------------------------------------------------------------


def _spaces(program: Program) -> list[str]:
    """The small spaces, but that of the tensor, that a sweep reads values of."""
    read = {n.space.name for n in postorder(program.roots()) if n.op == "load"}
    return [x for x in ("row", "col", "mat") if x in read]


def _places(schedule: Schedule) -> list[str]:
    """The tile function's arguments that say which elements are meant."""
    program = schedule.program
    beside = (["block"] if program.block > 1 else []) + (["eight"] if is_packed(program) else []) + _spaces(program)
    found = [*(f"at_{x}" if x else "at" for x in ["", *beside]), *(f"live_{x}" if x else "live" for x in ["", *beside])]
    if _is_counted(program):
        found.append("index")
    return [*found, *(x.split(" = ")[0].strip() for x in extents(program, Table.of(program)))]


def _is_counted(program: Program) -> bool:
    return any(n.op == "index" for n in postorder(program.roots()))


def _panels(schedule: Schedule, function: str, frame: Frame, source: str) -> list[str]:
    """The tile function of a sweep, and the two kernels over it (optgen.runtime.gpu.panels)."""
    program = schedule.program
    part = _part(program)
    more = [f"matrices={frame.matrices}", *([f"part={part}"] if part != 256 else [])]
    record = sweep(schedule, frame.table(program), more, "Panels")
    host = scalars(program)
    args = ["table", "work", *(f"{h}: tl.float32" for h in host), "step_key: tl.int32", "GRAD: tl.constexpr"]
    out = tile(schedule, function, source, _places(schedule), SmallPrinter)
    panel = panel_columns(program.block)
    for name, walker, constants, doc in (
        (function, "walk_panels", ["ROWS", "ALIGNED"], f"64 rows of {panel} columns of a matrix"),
        (f"{function}_flat", "walk_any", ["TILES"], "tiles of a tensor of any shape"),
    ):
        head = headed(name, [*args, *(f"{x}: tl.constexpr" for x in constants)], record)
        out += ["", "", ENTRY, *head, f'    """{program.name}: {doc}."""']
        out += walked(walker, name, host, ["GRAD", *constants])
    return out


def _nothing(t: Term) -> str:
    return 'float("-inf")' if t.is_max else "0.0"


def _max(t: Term) -> str:
    return ", True" if t.is_max else ""


# Between sweeps -------------------------------------------------------------------------------------------------------


class RoundPrinter(TritonPrinter):
    """A printer of work over the entries of a small space."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.spell = {**self.spell, "load": self._load, **dict.fromkeys(GATHERS, self._gather)}

    def _load(self, _: object, n: Node) -> tuple[str, int]:
        if n.space in ONE:
            return f"tl.load({n.attr}_ptr)", ATOM
        at = "at" if n.space == self.program.space else f"at_{n.space.name}"
        return f"get({n.attr}_ptr, {at}, live, True)", ATOM

    def _gather(self, _: object, n: Node) -> tuple[str, int]:
        (x,) = n.args
        assert x.op == "load", "what another round made is read from memory"
        return f"{n.op}({x.attr}_ptr, at, live, axes, columns)", ATOM


_SIZE = {"row": "rows", "col": "columns", "axis": "indices"}
_WHAT = {"row": "rows", "col": "columns", "axis": "the columns' dimensions", "mat": "matrices", "tensor": "the tensor",
         "model": "the model"}  # fmt: skip
WARPS_BETWEEN = 8
"""Warps of the kernels between sweeps: 8 entries for each thread."""
_ENTRIES = 32 * 8 * WARPS_BETWEEN
INDICES = 32
"""Indices of dimensions that a program takes at a time: of each it looks at as many columns together."""


def _between(level: Sequence[tuple[str, Stage]], function: str, frame: Frame) -> list[str]:
    """The rounds of a level, two functions each, and the kernel that goes through them."""
    out: list[str] = []
    programs = [s.schedule.program for _, s in level]
    for name, stage in level:
        round_ = _Round(stage, name)
        out += [*round_.values(), "", "", *round_.loops(), "", ""]
    host = list(dict.fromkeys(h for x in programs for h in scalars(x)))
    args = ["table", "work", *(f"{h}: tl.float32" for h in host), "LANES: tl.constexpr"]
    if len(level) > 1:
        args.append("ROUND: tl.constexpr = -1")
    out += ["@triton.jit", *wrapped(f"def {function}(", args)]
    out.append(f'    """{programs[0].name}: matrices of one tensor; see optgen.runtime.gpu.stages."""')
    out.append("    item = work + 3 * tl.program_id(0)")
    out.append(f"    row = table + {frame.width} * tl.load(item).to(tl.int64)")
    out.append("    first = tl.load(item + 1).to(tl.int64)")
    out.append("    end = tl.load(item + 2).to(tl.int64)")
    for b in {b.name: b for x in programs for b in x.buffers}.values():
        out.append(f"    {b.name}_ptr = pointer(row + {frame.values[b.name]}, {tl_dtype(b.dtype)}, False)")
    out.append(f"    rows = tl.load(row + {frame.matrices + 1})")
    out.append(f"    columns = tl.load(row + {frame.matrices + 2})")
    if any(_gathers(x) for x in programs):
        out.append(f"    axes = tl.load(row + {frame.matrices - 1}).to(tl.pointer_type(tl.int64))")
        out.append("    indices = tl.load(axes + 1)")
    out += dict.fromkeys(line for x in programs for line in extents(x, frame.table(x)))
    if len(level) > 1:
        out.append("    # All rounds, or one: what it sums over the parts of a tensor, other ranks have parts of.")
    for i, (name, stage) in enumerate(level):
        lines = [f"    {x}" for x in wrapped(f"{name}_round(", _Round(stage, name).taken, close=")")]
        if len(level) > 1:
            lines = [f"    if ROUND < 0 or ROUND == {i}:", *(f"    {x}" for x in lines)]
        if i:
            out.append("    tl.debug_barrier()  # what one round stores the next ones load")
        out += lines
    return out


def _gathers(program: Program) -> bool:
    """Return True if values of columns are read by the indices of their dimensions, or the other way round."""
    return any(n.op in GATHERS for n in postorder(program.roots()))


class _Round:
    """A round of small work: a function for some entries, and one that goes through all of them.

    Reductions over matrices have LANES lanes for each of a few matrices at a time, or 256 for one; what is reduced over
    the tensor has 256.  Entries that are missing in a power of two below 256 would only add zeros.
    """

    def __init__(self, stage: Stage, function: str) -> None:
        self.schedule, self.function = stage.schedule, function
        self.program = stage.schedule.program
        self.space = self.program.space.name
        self.terms = terms(stage.schedule)
        # A term may be reduced over matrices and over the tensor.
        self.whole, self.grouped = self._reduced(True), self._reduced(False)
        self.strict = self.program.maths == "strict"
        self.pointers = [f"{b.name}_ptr" for b in self.program.buffers]
        self.extents = [x.split(" = ")[0].strip() for x in extents(self.program, Table.of(self.program))]
        # What is reduced twice, in two groupings, is computed twice from what was there before anything is stored.
        self.twice = bool(self.whole and self.grouped)
        self.size = _SIZE.get(self.space, "1")
        self.gathers = _gathers(self.program)
        self.of_matrix = self.space in _SIZE and any(
            n.op == "load" and n.space == spaces.mat for n in postorder(self.program.roots())
        )

    def _reduced(self, whole: bool) -> list[Term]:
        """The terms that are reduced over the tensor, or over matrices, with these reductions alone."""
        out = []
        for t in self.terms:
            some = tuple(b for b in t.partials if (b.space == spaces.tensor) == whole)
            out += [replace(t, partials=some)] if some else []
        return out

    @property
    def taken(self) -> list[str]:
        """Return the arguments of the loops, by the names that the kernel has too."""
        axes = ["axes", "indices"] if self.gathers else []
        sizes = ["first", "end", "rows", "columns", *axes]
        return [*self.pointers, *self.extents, *sizes, *scalars(self.program), "LANES"]

    def _lets(self) -> list[str]:
        """Arguments of the function for entries that say which are meant."""
        found = ["at", "live"] if self.program.space not in ONE else []
        return [*found, *(["at_mat"] if self.of_matrix else []), *(["axes", "columns"] if self.gathers else [])]

    def values(self) -> list[str]:
        """The function for some entries: it stores, and returns the terms of the round's reductions."""
        sweep = self.schedule.sweep
        printer = RoundPrinter(self.program)
        host = [let.name for let in self.program.host]
        names = [x for x in self.pointers if x[:-4] not in {b.name for t in self.terms for b in t.partials}]
        names += [*self.extents, *self._lets(), *host, *(["STORED: tl.constexpr"] if self.twice else [])]
        out = ["@triton.jit", *wrapped(f"def {self.function}_values(", names)]
        out.append(f'    """Values of {_WHAT[self.space]}."""')
        nodes = postorder([s.node for s in sweep.stores])
        needed = {n.uid for n in nodes} - {n.args[0].uid for n in nodes if n.op in GATHERS}
        lines = bound_lines(tuple(let for let in sweep.lets if let.node.uid in needed), printer)
        for part in lines.values():
            out += [f"    {line}" for line in with_comments(part)]
        indent = "        " if self.twice else "    "
        stored = []
        for s in sweep.stores:
            buffer = self.program.buffer(s.buffer)
            if buffer.role != "partial" or buffer.space == spaces.model:
                value = printer.text(s.node)
                scalar = self.program.space in ONE
                put = (
                    f"tl.store({s.buffer}_ptr, {value})" if scalar else f"put({s.buffer}_ptr, at, {value}, live, True)"
                )
                stored.append(indent + put)
        if stored:
            out += ["    if STORED:", *stored] if self.twice else stored
        if self.terms:
            each = [f"term({printer.text(t.node)}, at, live, True{_max(t)})" for t in self.terms]
            out.append(f"    return {', '.join(each)}")
        return out

    def _call(self, indent: str, stored: bool = True) -> list[str]:
        names = [x for x in self.pointers if x[:-4] not in {b.name for t in self.terms for b in t.partials}]
        names += [*self.extents, *self._lets(), *scalars(self.program), *([str(stored)] if self.twice else [])]
        results = f"{', '.join(t.name for t in self.terms)} = " if self.terms else ""
        lines = wrapped(f"{results}{self.function}_values(", names, close=")")
        return [indent + x for x in ([f"at_mat = at // {self.size}"] if self.of_matrix else []) + lines]

    def loops(self) -> list[str]:
        """The function that goes through all entries."""
        names = [*self.taken[:-1], "LANES: tl.constexpr"]
        out = ["@triton.jit", *wrapped(f"def {self.function}_round(", names)]
        out.append(f'    """All values of {_WHAT[self.space]}."""')
        if self.grouped:
            out += self._matrices(stored=not self.whole)
        if self.whole:
            out += self._tensor()
        if not self.terms:
            out += self._entries()
        return out

    def _entries(self) -> list[str]:
        if self.program.space in ONE:
            return self._call("    ")
        size = f" * {self.size}" if self.size != "1" else ""
        together = INDICES if self.program.space == spaces.axis else _ENTRIES
        out = [f"    for start in range(first{size}, end{size}, {together}):"]
        out.append(f"        at = start + tl.arange(0, {together})")
        out.append(f"        live = at < end{size}")
        return out + self._call("        ")

    def _lanes(self, found: Sequence[Term], count: str, base: str, to: str, indent: str, stored: bool) -> list[str]:
        """`count` entries from `base` in 256 lanes, several of a lane at a time."""
        each = _ENTRIES // 256
        out = [f"{indent}{t.name}s = tl.full([256], {_nothing(t)}, tl.float32)" for t in found]
        out.append(f"{indent}for start in range(0, {count}, {_ENTRIES}):")
        out.append(f"{indent}    lane = start + tl.arange(0, {each})[:, None] * 256 + tl.arange(0, 256)[None, :]")
        out.append(f"{indent}    at = {base}lane")
        out.append(f"{indent}    live = lane < {count}")
        out += self._call(f"{indent}    ", stored)
        for t in found:
            if self.strict or t.is_max:
                out.append(f"{indent}    {t.name}s = down({t.name}s, {t.name}{_max(t)})")
            else:
                out.append(f"{indent}    {t.name}s += tl.sum({t.name}, 0)")
        for t in found:
            lanes = f"tl.reshape({t.name}s, [1, 256])"
            for b in t.partials:
                out.append(f"{indent}tl.store({b.name}_ptr + {to}tl.arange(0, 1), {folded(t, lanes, self.strict)})")
        return out

    def _matrices(self, stored: bool) -> list[str]:
        size = self.size
        out = ["    if LANES == 256:", "        for number in range(first, end):"]
        out += self._lanes(self.grouped, size, f"number * {size} + ", "number + ", " " * 12, stored)
        out.append("    else:")
        out.append(f"        for group in range(first, end, {_ENTRIES} // LANES):")
        out.append(f"            number = group + tl.arange(0, {_ENTRIES} // LANES)")
        out.append("            lane = tl.arange(0, LANES)[None, :]")
        out.append(f"            at = number[:, None] * {size} + lane")
        out.append(f"            live = (number < end)[:, None] & (lane < {size})")
        out += self._call(" " * 12, stored)
        for t in self.grouped:
            for b in t.partials:
                # Lanes begin with 0, to which -0 adds nothing.
                x = f"{t.name} + 0.0" if self.strict and not t.is_max else t.name
                out.append(
                    f"            tl.store({b.name}_ptr + number, {folded(t, x, self.strict)}, mask=number < end)"
                )
        return out

    def _tensor(self) -> list[str]:
        count = f"end * {self.size}" if self.size != "1" else "end"
        return self._lanes(self.whole, count, "", "", "    ", True)


__all__ = ["Frame", "Kernels", "kernels", "needs", "panel_columns"]
