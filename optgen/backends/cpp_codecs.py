"""C++ text of storage formats alone; `runtime/cpu/cpp/sweep.h` joins it with rules.

A codec is a struct of the fields of a value in a tile: how they are read, and how a new value is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from optgen.backends import cpp
from optgen.backends.codec import ROOT, UNROUNDED, CodecText, X
from optgen.backends.cpp import STORED, CppPrinter, Phases, assigned, paired, stored, tables, type_of
from optgen.backends.cpp_text import NAMES, reached
from optgen.backends.idioms import magnitude
from optgen.backends.printer import computed, with_comments
from optgen.backends.triton_text import C
from optgen.ir import node as ir
from optgen.ir.node import Node, postorder
from optgen.ir.program import Buffer, Step
from optgen.ops import dtypes, spaces


def _f(printer: CppPrinter, node: Node) -> str:
    return f"F({printer.text(node)})" if node.space == spaces.host or node.op == "const" else printer.text(node)


class _CodecPhases(Phases):
    """The loops of a codec.

    given  the node that its argument x stands for
    new    before the names of values of rows and columns: they are those of the new value
    """

    def __init__(self, step: Step, given: Node | None = None, new: str = "") -> None:
        schedule = step.sweeps[-1].schedule
        lets = tuple(
            let for let in schedule.sweep.lets if let.node is not given and (let.node.op != "load" or given is None)
        )
        self.new = new
        head = {given.uid: "x"} if given is not None else {}
        super().__init__(replace(schedule, sweep=replace(schedule.sweep, lets=lets)), NAMES, head)

    def place(self, load: Node) -> str:
        name = load.space.name
        if name in ("row", "mat"):
            return f"{self.new}{load.attr}_at + (unsigned)(i & mask)"
        return super().place(load) if name != "col" else f"{self.new}{load.attr}_at + i"


def _buffers(codec: CodecText) -> list[Buffer]:
    """The buffers of elements and blocks."""
    known = {b.name: b for s in (codec.decode, codec.nearest) for b in s.sweeps[-1].schedule.program.buffers}
    return [known[name] for name in codec.names]


def _block(codec: CodecText) -> int:
    return max((b.space.size or 1 for b in _buffers(codec)), default=1)


def codec_structs(codec: CodecText, name: str, doc: str, both: bool, small: Iterable[list[str]]) -> list[list[str]]:
    """The structs NAME_fields, which reads, and NAME_stochastic and NAME_nearest, which store.

    both   True if the format rounds some values by random bits and some to nearest
    small  static functions of NAME_fields: the work on values of rows and columns before and between sweeps
    """
    fields = f"{name}_fields"
    members = [*_Fields(codec).lines(fields), *(line for function in small for line in function)]
    out = [[f"// {doc}", f"struct {fields} : Codec {{", *(f"    {x}" if x else "" for x in members), "};"]]
    if codec.encode is not None:
        out.append(_encoder(codec, codec.encode, f"{name}_stochastic", fields))
    if codec.encode is None or both:
        out.append(_encoder(codec, codec.nearest, f"{name}_nearest", fields))
    return out


def table_lines(codecs: Iterable[CodecText]) -> list[str]:
    """The tables that codecs look numbers up in, each once."""
    steps = [x for codec in codecs for x in (codec.decode, codec.root, codec.encode, codec.nearest) if x is not None]
    return tables(root for step in steps for root in step.sweeps[-1].schedule.program.roots())


class _Fields:
    """The members of a struct that reads.

    few        names of the values of rows and columns
    arrays     values of blocks that its functions read, name -> type
    stages     the lines that fill these arrays
    functions  the functions `times` and `root`
    """

    def __init__(self, codec: CodecText) -> None:
        self.buffers, self.block, self.has_root = _buffers(codec), _block(codec), codec.root is not None
        self.packed = [b for b in self.buffers if b.dtype.packed]
        self.few = [x for x in codec.reads if x not in codec.names]
        self.arrays: dict[str, str] = {}
        self.stages: dict[str, str] = {}
        self.functions: list[list[str]] = []
        for step in (codec.decode, codec.root):
            if step is not None:
                reader = _Reader(step)
                self.arrays |= reader.arrays
                for line, comment in reader.stages:
                    self.stages.setdefault(line, comment)
                self.functions.append(reader.lines())

    def lines(self, struct: str) -> list[str]:
        """Return the members of the struct of this name."""
        pointers, initializers = self._pointers()
        out = [f"static constexpr int FIELDS = {len(initializers)};"]
        wide = bool(self.few) or any(b.dtype in (dtypes.f16, dtypes.f32) for b in self.buffers)
        flags = ["HAS_ROOT"] * self.has_root + ["WIDE"] * wide
        out += [f"static constexpr bool {name} = true;" for name in flags]
        out += pointers
        # Codes of a value that has rows and columns lie in the blocks of other values.
        size = "WIDEST" if self.few else self.block
        out += [f"alignas(64) uint8_t {b.name}_at[most_of({size})];" for b in self.packed]
        out += _struct("In", self.arrays, self.block) if self.arrays else []
        more = "more" if len(initializers) > 1 else ""
        out += ["", f"{struct}(char *first, char *const *{more}) : {', '.join(initializers)} {{}}"]
        out += ["void within(int row_mask) { mask = row_mask; }"] if self.few else []
        if self.packed:
            unpacked = " ".join(f"unpack<{b.dtype.bits}>({b.name}_at, {b.name}_packed, count);" for b in self.packed)
            out.append(f"void unpack_codes(int count) {{ {unpacked} }}")
        if self.arrays:
            stages = with_comments(list(self.stages.items()), comment_mark="//")
            out += ["void decode_blocks(int b) {", *(f"    {x}" for x in (*stages, _set("In", self.arrays))), "}"]
            out.append("In in(int b) const { return of_in[b]; }")
        return [*out, *(line for function in self.functions for line in function)]

    def _pointers(self) -> tuple[list[str], list[str]]:
        """Return the declarations of pointers to what is stored, and their initializers."""
        places = ["first", *(f"more[{k}]" for k in range(len(self.buffers) + len(self.few)))]
        pointers, initializers = [], []
        for b, place in zip(self.buffers, places, strict=False):
            kind, name = STORED[b.dtype.name], f"{b.name}_{'packed' if b.dtype.packed else 'at'}"
            pointers.append(f"{kind} *__restrict {name};")
            initializers.append(f"{name}(({kind} *){place})")
        for x, place in zip(self.few, places[len(self.buffers) :], strict=False):
            initializers.append(f"{x}_at((const float *){place})")
        if self.few:
            pointers.append(f"const float {', '.join(f'*__restrict {x}_at' for x in self.few)};")
            pointers.append("int mask = -1;")
        return pointers, initializers


def _struct(name: str, members: Mapping[str, str], block: int = 0) -> list[str]:
    """Return a struct of blocks' values, name -> type, and if `block` is given the array of it: of_<name>."""
    of = [f"{kind} {', '.join(names)};" for kind, names in _by_kind(members).items()]
    array = [f"OfBlocks<{block}, {name}> of_{name.lower()};"] if block else []
    return [f"struct {name} {{ {' '.join(of)} }};", *array]


def _by_kind(members: Mapping[str, str]) -> dict[str, list[str]]:
    return {kind: [x for x, of in members.items() if of == kind] for kind in dict.fromkeys(members.values())}


def _set(name: str, members: Mapping[str, str]) -> str:
    """Return the line that fills such an array."""
    return f"of_{name.lower()}.set(b, {', '.join(x for names in _by_kind(members).values() for x in names)});"


def _scalar_lines(plan: Phases, step: Step) -> list[str]:
    """The lines that compute what is made of constants and c alone."""
    printer = CppPrinter(plan)
    found = [(let.name, computed(let.node)) for let in step.host if let.node.op != "sym"]
    return [f"const F {plan.scalar[name]}({printer.text(node)});" for name, node in found]


class _Reader:
    """The function `times` or `root` of a struct that reads.

    step    decode, or root
    arrays  blocks' values that the function reads, name -> type
    stages  the lines that fill these arrays, with their comments
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.plan = plan = _CodecPhases(step)
        (phase,) = plan.phases
        plan.scalar[C] = C
        scaled = {n.uid for n in plan.nodes if any(a.op == "sym" for a in postorder([n]))}
        # What a coefficient meets is computed where it is known; an element's own loads come with it.
        self.lets = [*(let for let in phase.blocks if let.node.uid in scaled), *phase.elements]
        (self.store,) = phase.stores or phase.block_stores
        own = {let.node.uid for let in self.lets}
        self.across, _ = plan.walk([*(let.node for let in self.lets), self.store.node], own)
        self.arrays = {plan.name[n.uid]: type_of(n.dtype) for n in self.across}
        printer, need = CppPrinter(plan), reached(self.across, ())
        blocks = [let for let in phase.blocks if let.node.uid in need and let.node.uid not in scaled]
        self.stages = [assigned(plan, let, printer) for let in blocks]

    def lines(self) -> list[str]:
        """Return the function."""
        plan, node = self.plan, self.store.node
        printer = CppPrinter(plan)
        printer.names |= {n.uid: f"in.{plan.name[n.uid]}" for n in self.across}
        need = reached([node], {n.uid for n in self.across})
        lines = [assigned(plan, let, printer) for let in self.lets if let.node.uid in need]
        if self.store.buffer == ROOT:
            head, result = "F root(const In &in, int i) const {", _f(printer, node)
        else:
            factors = node.args if node.op == "mul" and node.uid not in printer.names else (node,)
            texts = [*(_f(printer, a) for a in factors), *(["F(1.0f)"] if len(factors) == 1 else [])]
            head, result = "Product times(F c, const In &in, int i) const {", f"{{{', '.join(texts)}}}"
        body = [*_scalar_lines(plan, self.step), *with_comments(lines, comment_mark="//"), f"return {result};"]
        return [head, *(f"    {line}" for line in body), "}"]


def _given(step: Step) -> tuple[Node, bool]:
    """The node that an encoding begins with, and True if that is the root of the new value."""
    nodes = list(postorder([s.node for s in step.sweeps[-1].schedule.sweep.stores]))
    load = next((n for n in nodes if n.op == "load" and n.attr == X), ir.load(X, dtypes.f32, spaces.elem))
    users = [n for n in nodes if any(a is load for a in n.args)]
    stores = step.sweeps[-1].schedule.sweep.stores
    if len(users) == 1 and users[0].op == "sqrt" and all(s.node is not load for s in stores):
        return users[0], True
    return load, False


_CODEC = {"NOISE": 0, "LOOPS": 1, "ROOT_LOOP": 0, "READS": 1, "DRAWS": 0}
"""The constants of `Codec` in sweep.h, which need not be given where they are the same."""


def _encoder(codec: CodecText, step: Step, struct: str, fields: str) -> list[str]:
    """The struct that stores, which inherits from that of the fields."""
    given, rooted = _given(step)
    plan, block = _CodecPhases(step, given, "new_"), _block(codec)
    loops = [_Loop(plan, k, block) for k in range(len(plan.phases))]
    simple = len(loops) == 1 and not plan.phases[0].blocks  # one loop without blocks' values
    constants = [f"{name} = {n}" for name, n in _constants(plan, loops, given).items() if _CODEC[name] != n]
    members = _data(constants, rooted, _kept(plan, block), codec.given)
    members += [""] if members else []
    members.append(_constructor(struct, fields, codec.given) if codec.given else f"using {fields}::{fields};")
    members += [] if simple else ["using Codec::blocks, Codec::head, Codec::tail;"]
    scalars = _scalar_lines(plan, step)
    for loop in loops:
        members += loop.lines(scalars, simple)
    members += _pack_codes([b for b in _buffers(codec) if b.dtype.packed])
    return [f"struct {struct} : {fields} {{", *(f"    {x}" if x else "" for x in members), "};"]


def _kept(plan: _CodecPhases, block: int) -> list[str]:
    """Return what an encoding keeps: the first of two vectors of codes, arrays of what it finds of each block."""
    found = [n for phase in plan.phases for n in phase.reductions]
    arrays = [f"{plan.name[n.uid]}_kept[most_of({block}) / {block}]" for n in found]
    return [*paired(s for phase in plan.phases for s in phase.stores), *arrays]


def _data(constants: Sequence[str], rooted: bool, kept: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the members that are data.

    kept   what it keeps of vectors and blocks
    new    names of the values of rows and columns that encoding reads: the new ones
    """
    out = [f"static constexpr int {', '.join(constants)};"] if constants else []
    out += ["static constexpr bool ROOTED = true;"] if rooted else []
    out += [f"I {', '.join(kept)};"] if kept else []
    return out + ([f"const float {', '.join(f'*__restrict new_{x}_at' for x in new)};"] if new else [])


def _constants(plan: _CodecPhases, loops: Sequence[_Loop], given: Node) -> dict[str, int]:
    return {
        "NOISE": max((int(n.attr[1]) for n in plan.nodes if n.op == "draw"), default=0),
        "LOOPS": len(loops),
        "ROOT_LOOP": next((loop.k for loop in loops if any(s.buffer == ROOT for s in loop.phase.stores)), 0),
        "READS": sum(1 << loop.k for loop in loops if given in loop.computed),
        "DRAWS": sum(1 << loop.k for loop in loops if any(n.op == "draw" for n in loop.computed)),
    }


def _pack_codes(packed: Sequence[Buffer]) -> list[str]:
    """Return the function that packs the codes of a tile; nothing where there are none to pack."""
    if not packed:
        return []
    texts = [f"no_codes<BLOCK>({b.name}_at, blocks, live);" for b in packed]
    texts += [f"pack<{b.dtype.bits}>({b.name}_packed, {b.name}_at, BLOCK * blocks);" for b in packed]
    head = "template <int BLOCK> void pack_codes(int blocks, const int *live) {"
    return [head, *(f"    {x}" for x in texts), "}"]


def _constructor(struct: str, fields: str, new: Sequence[str]) -> str:
    """The constructor of a struct that stores with new values of rows and columns, behind the fields."""
    places = ["FIELDS - 1", "FIELDS", *(f"FIELDS + {k}" for k in range(1, len(new)))]
    initializers = [f"new_{x}_at((const float *)more[{at}])" for x, at in zip(new, places, strict=False)]
    return f"{struct}(char *first, char *const *more) : {', '.join([f'{fields}(first, more)', *initializers])} {{}}"


class _Loop:
    """Loop k of an encoding: the work on blocks before it, its head and tail for a block, its work on elements.

    computed  the nodes that the loop over elements computes
    together  blocks' values that it reads, all made by the work on blocks
    members   (type, name, first value) of the blocks' values that it reads or finds: ("I", "top", "I(INT32_MIN)")
    """

    def __init__(self, plan: _CodecPhases, k: int, block: int) -> None:
        self.plan, self.k, self.block, self.phase = plan, k, block, plan.phases[k]
        self.together, self.computed = plan.of_elements(self.phase)
        self.members = [(type_of(n.dtype), plan.name[n.uid], "") for n in self.together]
        for n in self.phase.reductions:
            least = "INT32_MAX" if n.op == "block_min" else "0" if magnitude(n) else "INT32_MIN"
            self.members.append(("I", plan.name[n.uid], f"I({least})"))

    def struct(self) -> list[str]:
        """Return the struct of the blocks' values that a loop reads and finds."""
        if not self.members:
            return [f"struct Head_{self.k} {{}};"]
        return _struct(f"Head_{self.k}", self._types(), self.block if self.together else 0)

    def _types(self) -> dict[str, str]:
        return {name: kind for kind, name, _ in self.members}

    def lines(self, scalars: list[str], simple: bool) -> list[str]:
        """Return the functions blocks, head, tail and encode.

        scalars  the lines that compute what is made of constants
        simple   True for the one loop of an encoding without blocks' values
        """
        phase, k = self.phase, self.k
        out: list[str] = []
        if phase.found or phase.blocks or phase.block_stores:
            out += [f"void blocks(Loop<{k}>, int b) {{", *self._blocks(scalars), "}"]
        if not simple:
            values = {name: value for _, name, value in self.members}
            order = [x for names in _by_kind(self._types()).values() for x in names]
            head = f"of_head_{k}[b]" if self.together else f"{{{', '.join(values[x] for x in order)}}}"
            out += [*self.struct(), f"Head_{k} head(Loop<{k}>, int{' b' if values else ''}) const {{ return {head}; }}"]
        if phase.reductions:
            names = [self.plan.name[n.uid] for n in phase.reductions]
            ends = " ".join(f"{name}_kept[b] = h.{name};" for name in names)
            out.append(f"void tail(Loop<{k}>, const Head_{k} &h, int b) {{ {ends} }}")
        kind = "Head" if simple else f"Head_{k}"
        head = f"auto encode(Loop<{k}>, {kind} &h, int i, int end, F x, const N &noise) {{"
        return [*out, f"template <bool RAGGED, int VALUE, class N> {head}", *self._encode(scalars), "}"]

    def _blocks(self, scalars: list[str]) -> list[str]:
        """Return the lines of the work on the blocks' own values, a vector of blocks at a time."""
        plan, phase = self.plan, self.phase
        printer = CppPrinter(plan)
        lines: list[tuple[str, str]] = [(x, "") for x in scalars]
        for n in phase.found:
            name = printer.names[n.uid] = plan.name[n.uid]
            above = f" + {dtypes.NAN_LAST:#x}" if n.op == "block_max" and magnitude(n) else ""
            lines.append((f"const I {name} = {cpp.BLOCK_LIMITS[n.op]}({name}_kept + b){above};", ""))
        lines += [assigned(plan, let, printer) for let in phase.blocks]
        if self.together:
            lines.append((_set(f"Head_{self.k}", {plan.name[n.uid]: type_of(n.dtype) for n in self.together}), ""))
        lines += [(stored(plan, s, printer, "b"), "") for s in phase.block_stores]
        return [f"    {x}" for x in with_comments(lines, comment_mark="//")]

    def _encode(self, scalars: list[str]) -> list[str]:
        """Return the lines of the work on elements; it returns the roots, or x where another loop has them."""
        plan, phase = self.plan, self.phase
        printer = CppPrinter(plan)
        printer.names |= {n.uid: f"h.{plan.name[n.uid]}" for n in self.together}
        lines: list[tuple[str, str]] = [(x, "") for x in scalars]
        lines += [assigned(plan, let, printer) for let in phase.elements]
        for n in phase.reductions:
            (x,), name, better = n.args, plan.name[n.uid], "larger" if n.op == "block_max" else "smaller"
            if n.op == "block_max":
                x = magnitude(n) or x
            elif x.op == "and":  # of numbers >= +0; a NaN of either sign is larger without one
                (x, _) = x.args
            lines.append((f"h.{name} = {better}<RAGGED>(h.{name}, {printer.text(x)}, i, end);", ""))
        roots = {s.buffer: _f(printer, s.node) for s in phase.stores if s.buffer in (ROOT, UNROUNDED)}
        lines += [(stored(plan, s, printer, "i", pairs=True), "") for s in phase.stores if s.buffer not in roots]
        both = f"Roots({roots[ROOT]}, {roots[UNROUNDED]})" if UNROUNDED in roots else roots.get(ROOT, "x")
        lines.append((f"return {both};", ""))
        return [f"    {x}" for x in with_comments(lines, comment_mark="//")]


__all__ = ["codec_structs", "table_lines"]
