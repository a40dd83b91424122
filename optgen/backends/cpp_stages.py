"""C++ kernels of steps that take several stages: a tile function for each stage, and a table that says what it reads.

A sweep is printed as any other kernel (cpp.py); values of rows, columns and matrices come as arrays of the tile, those
of tensors as one number, and what is to be reduced goes to an array of the tile.  Who walks the tiles and adds up is
`stages.h`.  Small work between sweeps is a loop over a stretch of its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optgen.backends.cpp import BLOCKS, FLAT, RESERVED, CppPrinter, Phases, head_of_tile, loops
from optgen.backends.printer import comment_of, with_comments
from optgen.ir.node import postorder
from optgen.ir.program import Buffer, Let, Schedule, Stage, Step
from optgen.ops import spaces

_KIND = {"elem": "ELEMENT", "block": "BLOCK_OF", "row": "ROW", "col": "COLUMN", "mat": "MATRIX", "tensor": "WHOLE",
         "model": "WHOLE", "axis": "AXIS"}  # fmt: skip
_REDUCTION = {"": "NONE", "sum": "TOTAL", "max": "LARGEST"}
_STORED = {
    "f32": "float", "bf16": "uint16_t", "f16": "uint16_t", "i32": "int32_t", "i16": "int16_t", "i8": "int8_t",
    "u8": "uint8_t", "u4": "uint8_t", "u2": "uint8_t", "u1": "uint8_t",
}  # fmt: skip

# What the tile functions of stages receive, beside what all receive.
_RESERVED = RESERVED | frozenset("AXIS extent ELEMENT INDEXED Known known LARGEST MATRICES NONE Place PLACES row_mask "
                                 "SPACE Stage stage step_key stream_key StageColumn TOTAL WHOLE".split())  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The addresses of a table row, in order: p, g, the fields, the temps, the partial results of sweeps."""

    stored: tuple[Buffer, ...]
    temps: tuple[Buffer, ...]
    partials: tuple[Buffer, ...]

    @classmethod
    def of(cls, step: Step) -> Columns:
        by_sweeps = {b.name for s in step.sweeps for b in s.schedule.partials}
        temps = step.temps
        return cls(step.program.buffers, temps, tuple(t for t in temps if t.name in by_sweeps))

    def position(self, name: str) -> int:
        names = [b.name for b in (*self.stored, *self.temps)]
        return names.index(name)

    def partial(self, name: str) -> int:
        """Position of the partial results; -1 where there are none."""
        names = [b.name for b in self.partials]
        return len(self.stored) + len(self.temps) + names.index(name) if name in names else -1


class StagePhases(Phases):
    """Phases of a stage: in a sweep, few values have no lets in the loops.

    They are read where they are needed, because an array of the tile that holds them is there already; what is one
    value for the tensor is worked out before the loops.
    """

    def __init__(self, schedule: Schedule, function: str) -> None:
        sweep = schedule.sweep
        over_elements = schedule.program.space == spaces.elem
        few = [x for x in sweep.lets if over_elements and x.node.space.name in spaces.SMALL]
        skip = {let.node.uid for let in few}
        kept = tuple(let for let in sweep.lets if let.node.uid not in skip)
        self.source = _sources(schedule)
        stores = tuple(s for s in sweep.stores if self.source.get(s.buffer, s.buffer) == s.buffer)
        super().__init__(replace(schedule, sweep=replace(sweep, lets=kept, stores=stores)), function, _RESERVED)
        read = {n.uid for n in postorder(s.node for s in sweep.stores)}
        whole = (spaces.tensor, spaces.model)
        self.before = [(x, self.fresh(x.name)) for x in few if x.node.space in whole and x.node.uid in read]

    def first_lines(self) -> list[str]:
        """The lets before the loops; from here on their names are known to all printers."""
        lines = []
        for let, name in self.before:
            text, _ = CppPrinter(self).express(let.node)
            lines.append((f"const F {name} = {text};", comment_of(let)))
            self.head[let.node.uid] = name
        return with_comments(lines, comment_mark="//")


def _sources(schedule: Schedule) -> dict[str, str]:
    """Return for each partial the first one that reduces the same values: their array is written once."""
    first: dict[int, str] = {}
    partials = {b.name for b in schedule.partials if b.space != spaces.model}
    return {s.buffer: first.setdefault(s.node.uid, s.buffer) for s in schedule.sweep.stores if s.buffer in partials}


def _size(b: Buffer) -> tuple[str, str]:
    """(bytes per entry, what there is one of)."""
    if b.dtype.packed:
        return str(b.dtype.bits), "EIGHTH"
    return "sizeof(typename Grad::stored)" if b.role == "grad" else str(int(b.dtype.bytes)), _KIND[b.space.name]


def _place(b: Buffer, columns: Columns, sweep: bool, source: int) -> str:
    # What is summed over the model is left as it is: one value for the tensor, which the host adds up.
    reduction = "NONE" if b.space == spaces.model else _REDUCTION[b.reduction.partition("_")[2]]
    size, kind = _size(b)
    partial = columns.partial(b.name) if sweep and b.role == "partial" else -1
    flags = f"{str(b.reads).lower()}, {str(b.writes).lower()}"
    return f"{{{columns.position(b.name)}, {partial}, {size}, {kind}, {flags}, {reduction}, {source}}}"


def _pointer(b: Buffer, position: int) -> tuple[str, str]:
    kind = "typename Grad::stored" if b.role == "grad" else _STORED[b.dtype.name]
    const = "" if b.writes else "const "
    access = " and ".join(w for w, yes in (("read", b.reads), ("written", b.writes)) if yes)
    if b.dtype.packed:
        pointer = f"{const}uint8_t *__restrict {b.name}_packed = ({const}uint8_t *)at[{position}];"
        return pointer, f"{b.dtype.bits}-bit codes [n]  {access}"
    if b.role == "partial":
        access = f"for {b.reduction}"
    of = f"blocks of {b.space.size}" if b.space.size else {"elem": "n"}.get(b.space.name, b.space.name)
    comment = f"{'float' if b.role == 'grad' else b.dtype.torch} [{of}]  {access}"
    return f"{const}{kind} *__restrict {b.name}_at = ({const}{kind} *)at[{position}];", comment


@dataclass(frozen=True)
class Text:
    """The structs of a step that takes several stages.

    host    the scalars that are passed
    source  the file of the spec
    """

    step: Step
    host: Sequence[Let]
    source: str = ""

    @property
    def printed(self) -> list[int]:
        """The stages that are kernels."""
        return [k for k, stage in enumerate(self.step.stages) if not stage.call]

    def stage(self, number: int, name: str) -> list[str]:
        """The struct of one stage: `name` with its tile function and its places."""
        found, columns = self.step.stages[number], Columns.of(self.step)
        program = found.schedule.program
        assert len(program.buffers) <= 256, "stages.h: MOST"
        assert found.is_sweep or all(b.dtype.name == "f32" for b in program.buffers), "few values are fp32"
        plan = StagePhases(found.schedule, name)
        block = program.block if found.is_sweep else 1
        matrices = any(b.space.name in ("row", "col", "mat") for b in program.buffers)
        indexed = "DRAWN != 0" if plan.drawn else str(any(n.op == "index" for n in plan.nodes)).lower()
        out = [f"// {'a sweep' if found.is_sweep else found.space.name}: {found.why}"]
        out += ["template <class Weight, class Grad>", f"struct {name} {{", *plan.noise_lines()]
        tile = f"{BLOCKS * block}" if found.is_sweep and program.block > 1 else str(FLAT)
        out.append(f"    static constexpr int BLOCK = {block}, TILE = {tile};")
        out.append(f"    static constexpr Kind SPACE = {_KIND[found.space.name]};")
        out.append(f"    static constexpr bool MATRICES = {str(matrices).lower()}, INDEXED = {indexed};")
        # The weight's places, of which there may be several, stand last.
        own = [b for b in program.buffers if not (plan.weight and b.role == "param")]
        weights = [b for b in program.buffers if b not in own]
        out.append("    // column of the table, of partials; bytes per entry, of what; read, written, reduced, from")
        flags = [f"{str(any(x)).lower()}" for x in ([b.reads for b in weights], [b.writes for b in weights])]
        out.append(f"    static constexpr auto PLACES = places<Weight, {', '.join(flags)}, Place>({{")
        names = [b.name for b in own]
        for b in own:
            first = names.index(plan.source.get(b.name, b.name))
            out.append(f"        {_place(b, columns, found.is_sweep, first)},  // {b.name}")
        out += ["    });", ""]
        extent = "blocks" if block > 1 else "count"
        out += head_of_tile(extent, "int row_mask, const Known &known")
        pointers = [_pointer(b, k) for k, b in enumerate(own) if plan.source.get(b.name, b.name) == b.name]
        body = [f"Weight weight(at[{len(own)}], at + {len(own) + 1});"] if weights else []
        body += with_comments(pointers, comment_mark="//")
        body += self._known(found, plan)
        body += plan.first_lines()
        body += loops(plan, extent, self.source)
        out += [f"        {line}" if line else "" for line in body]
        return [*out, "    }", "};"]

    def _known(self, stage: Stage, plan: StagePhases) -> list[str]:
        """Return the lines for what the stage reads of the tensor, the step and the scalars."""
        program, sweep = stage.schedule.program, stage.schedule.sweep
        nodes = list(postorder([let.node for let in sweep.lets] + [s.node for s in sweep.stores]))
        read = {n.attr for n in nodes if n.op == "sym"}
        keys = {n.attr for n in nodes if n.op == "key"} | ({"step_key", "stream_key"} if plan.drawn else set())
        sized = any(n.op == "extent" for n in nodes)
        out = ["const float *extent = known.extent;  // rows, columns, elements"] if sized else []
        out += [f"const int32_t {key} = known.{key};" for key in ("step_key", "stream_key") if key in keys]
        places = {let.node.uid: k for k, let in enumerate(self.host)}
        for k, let in zip(stage.scalars, program.host, strict=True):
            if let.name in read:
                passed = places[self.step.host[k].node.uid]
                out.append(f"const F {plan.scalar[let.name]}(known.scalars[{passed}]);")
        return out

    def whole(self, name: str, stages: Sequence[str]) -> list[str]:
        """The struct of the step: its table and the names of its stages' structs, in order."""
        columns, block = Columns.of(self.step), self.step.program.block
        out = ["template <class Weight, class Grad>", f"struct {name} {{", "    typedef void staged;"]
        out.append(f"    static constexpr int SCALARS = {len(self.host)}, BLOCK = {block};")
        out.append("    // bytes per entry, what there is one of")
        is_open = columns.stored[0].dtype.name == "f32"
        is_empty = is_open and len(columns.stored) + len(columns.temps) == 2
        braces = ("(", ")") if is_empty else ("({", "})")
        head = f"auto COLUMNS = columns<Weight, Grad, StageColumn>{braces[0]}"
        out.append(f"    static constexpr {head if is_open else 'StageColumn COLUMNS[] = {'}")
        rest = columns.stored[2:] if is_open else columns.stored
        for b in rest:
            size, kind = _size(b)
            out.append(f"        {{{size}, {kind}}},  // {b.name}")
        out += [f"        {{{b.dtype.bytes:g}, {_KIND[b.space.name]}}},  // {b.name}" for b in columns.temps]
        for b in columns.partials:
            out.append(f"        {{4, {_KIND[b.space.name]} + 8}},  // partial results of {b.name}")
        out.append(f"    {braces[1]};" if is_open else "    };")
        out.append("    static constexpr Stage STAGES[] = {")
        out += [f"        stage<{piece}<Weight, Grad>>()," for piece in stages]
        return [*out, "    };", "};"]
