"""C++ text of storage formats alone; `runtime/cpu/cpp/sweep.h` joins it with rules.

A codec is a struct of the fields of a value in a tile: how they are read, and how a new value is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from optgen.backends.codec import ROOT, Codec, X
from optgen.backends.cpp import KEPT, STORED, CppPrinter, Phases, assigned, keep, read_kept, stored, tables, type_of
from optgen.backends.cpp_text import NAMES, reached
from optgen.backends.printer import computed, with_comments
from optgen.backends.triton_text import C
from optgen.ir import node as ir
from optgen.ir.node import Node, postorder
from optgen.ir.program import Buffer, Schedule, Step
from optgen.ops import dtypes, spaces


def _f(printer: CppPrinter, node: Node) -> str:
    return f"F({printer.text(node)})" if node.space == spaces.host or node.op == "const" else printer.text(node)


class _CodecPhases(Phases):
    """The loops of a codec.

    given  the node that its argument x stands for
    new    before the names of values of rows and columns: they are those of the new value
    """

    def __init__(self, schedule: Schedule, given: Node | None = None, new: str = "") -> None:
        skip = {given.uid} if given is not None else set()
        lets = tuple(
            let for let in schedule.sweep.lets if let.node.uid not in skip and (let.node.op != "load" or given is None)
        )
        head = {given.uid: "x"} if given is not None else {}
        self.new = new
        super().__init__(replace(schedule, sweep=replace(schedule.sweep, lets=lets)), NAMES, head)

    def place(self, load: Node) -> str:
        name = load.space.name
        if name in ("row", "mat"):
            return f"{self.new}{load.attr}_at + (unsigned)(i & mask)"
        return super().place(load) if name != "col" else f"{self.new}{load.attr}_at + i"

    def _trivial(self, n: Node) -> bool:
        looks = n.op in ("abs", "neg", "bitcast") and n.space.name == "elem"
        return super()._trivial(n) or (looks and n.args[0].uid in self.head)


def _buffers(codec: Codec) -> list[Buffer]:
    """The buffers of elements and blocks."""
    known = {b.name: b for s in (codec.decode, codec.nearest) for b in s.sweeps[-1].schedule.program.buffers}
    return [known[name] for name in codec.names]


def codec_structs(codec: Codec, name: str, doc: str, both: bool, small: Iterable[list[str]]) -> list[list[str]]:
    """The structs NAME_fields, which reads, and NAME_stochastic and NAME_nearest, which store.

    both   True if the format rounds some values by random bits and some to nearest
    small  static functions of NAME_fields: the work on values of rows and columns before and between sweeps
    """
    fields = f"{name}_fields"
    nearest = _Encoder(codec, codec.nearest)
    *head, end = _fields(codec, fields)
    out = [[f"// {doc}", *head, *(f"    {line}" for function in small for line in function), end]]
    if codec.encode is None:
        return [*out, nearest.lines(f"{name}_nearest", fields)]
    stochastic = _Encoder(codec, codec.encode)
    out.append(stochastic.lines(f"{name}_stochastic", fields))
    if not both:
        return out
    if nearest.extends(stochastic):
        return [*out, nearest.lines(f"{name}_nearest", f"{name}_stochastic", stochastic)]
    return [*out, nearest.lines(f"{name}_nearest", fields)]


def table_lines(codecs: Iterable[Codec]) -> list[str]:
    """The tables that codecs look numbers up in, each once."""
    steps = [x for codec in codecs for x in (codec.decode, codec.root, codec.encode, codec.nearest) if x is not None]
    return tables(root for step in steps for root in step.sweeps[-1].schedule.program.roots())


def _fields(codec: Codec, struct: str) -> list[str]:
    buffers, few = _buffers(codec), [x for x in codec.reads if x not in codec.names]
    block = max((b.space.size or 1 for b in buffers), default=1)
    out = [f"struct {struct} : Codec {{", f"    static constexpr int FIELDS = {len(buffers) + len(few)};"]
    out += ["    static constexpr bool HAS_ROOT = true;"] if codec.root is not None else []
    wide = bool(few) or any(b.dtype in (dtypes.f16, dtypes.f32) for b in buffers)
    out += ["    static constexpr bool WIDE = true;"] if wide else []
    made = []
    for k, b in enumerate(buffers):
        kind, address = STORED[b.dtype.name], "first" if k == 0 else f"more[{k - 1}]"
        if b.dtype.packed:
            out.append(f"    uint8_t *__restrict {b.name}_packed;")
            made.append(f"{b.name}_packed((uint8_t *){address})")
        else:
            out.append(f"    {kind} *__restrict {b.name}_at;")
            made.append(f"{b.name}_at(({kind} *){address})")
    for k, name in enumerate(few, len(buffers)):
        made.append(f"{name}_at((const float *){'first' if k == 0 else f'more[{k - 1}]'})")
    if few:
        out.append(f"    const float {', '.join(f'*__restrict {name}_at' for name in few)};")
        out.append("    int mask = -1;")
    packed = [b for b in buffers if b.dtype.packed]
    # Codes of a value that has rows and columns lie in the blocks of other values.
    out += [f"    alignas(64) uint8_t {b.name}_at[most_of({'WIDEST' if few else block})];" for b in packed]
    plans = [(_CodecPhases(step.sweeps[-1].schedule), step) for step in (codec.decode, codec.root) if step]
    kept: dict[str, str] = {}
    stages: list[tuple[str, str]] = []
    texts: list[list[str]] = []
    known: set[str] = set()
    (root,) = codec.root.sweeps[-1].schedule.sweep.stores if codec.root is not None else (None,)
    for plan, step in plans:
        function, arrays, lines = _reader(plan, step, root.node if root is not None else None)
        kept |= arrays
        texts.append(function)
        stages += [line for line in lines if line[0] not in known]
        known |= {line[0] for line in lines}
    out += [f"    {line}" for line in _struct("In", kept, block)] if kept else []
    more = "more" if len(made) > 1 else ""
    out += ["", f"    {struct}(char *first, char *const *{more}) : {', '.join(made)} {{}}"]
    if few:
        out.append("    void within(int row_mask) { mask = row_mask; }")
    if packed:
        unpacked = " ".join(f"unpack<{b.dtype.bits}>({b.name}_at, {b.name}_packed, count);" for b in packed)
        out.append(f"    void unpack_codes(int count) {{ {unpacked} }}")
    if kept:
        out.append("    void decode_blocks(int b) {")
        out += [f"        {line}" for line in with_comments(stages, comment_mark="//")]
        out += [f"        {_set('In', kept)}", "    }", "    In in(int b) const { return of_in[b]; }"]
    for text in texts:
        out += [f"    {line}" for line in text]
    return [*out, "};"]


def _struct(name: str, members: Mapping[str, str], block: int = 0) -> list[str]:
    """Return a struct of blocks' values, name -> type, and if `block` is given the array of it: of_<name>."""
    of = [f"{kind} {', '.join(own)};" for kind, own in _by_kind(members).items()]
    array = [f"OfBlocks<{block}, {name}> of_{name.lower()};"] if block else []
    return [f"struct {name} {{ {' '.join(of)} }};", *array]


def _by_kind(members: Mapping[str, str]) -> dict[str, list[str]]:
    return {kind: [x for x, own in members.items() if own == kind] for kind in dict.fromkeys(members.values())}


def _set(name: str, members: Mapping[str, str]) -> str:
    """Return the line that fills such an array."""
    return f"of_{name.lower()}.set(b, {', '.join(x for own in _by_kind(members).values() for x in own)});"


def _arrays(arrays: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the declarations of arrays, name -> (type, size): those of a type in one."""
    kinds = dict.fromkeys(kind for kind, _ in arrays.values())
    of = {kind: [f"{x}_kept[{size}]" for x, (own, size) in arrays.items() if own == kind] for kind in kinds}
    return [f"{kind} {', '.join(names)};" for kind, names in of.items()]


def _scalar_lines(plan: Phases, step: Step) -> list[str]:
    """The lines that compute what is made of constants and c alone."""
    printer = CppPrinter(plan)
    found = [(let.name, computed(let.node)) for let in step.host if let.node.op != "sym"]
    return [f"const F {plan.scalar[name]}({printer.text(node)});" for name, node in found]


def _reader(
    plan: _CodecPhases, step: Step, root: Node | None
) -> tuple[list[str], dict[str, str], list[tuple[str, str]]]:
    """The function `times` or `root`, the arrays of blocks' values that it reads, and the lines that fill them.

    root  what `root` returns, which `times` may call
    """
    (phase,) = plan.phases
    plan.scalar[C] = C
    scaled = {n.uid for n in plan.nodes if any(a.op == "sym" for a in postorder([n]))}
    # What a coefficient meets is computed where it is known; an element's own loads come with it.
    inside = [let for let in phase.blocks if let.node.uid in scaled]
    phase.blocks = [let for let in phase.blocks if let.node.uid not in scaled]
    own = {let.node.uid for let in (*inside, *phase.elements)}
    (store,) = phase.stores or phase.block_stores
    across = list(plan.uses([*(let.node for let in (*inside, *phase.elements)), store.node], own))
    printer = CppPrinter(plan)
    need = reached(across, ())
    stages = [assigned(plan, let, printer) for let in phase.blocks if let.node.uid in need]
    arrays = {plan.name[n.uid]: type_of(n.dtype) for n in across}
    printer = CppPrinter(plan)
    printer.names |= {n.uid: f"in.{plan.name[n.uid]}" for n in across}
    known = {n.uid for n in across}
    lines = []
    if store.buffer != ROOT and root is not None and root.uid in plan.name:
        known.add(root.uid)
        name = printer.names[root.uid] = plan.name[root.uid]
        lines = [(f"const F {name} = root(in, i);", "")]
    wants = reached([store.node], known)
    lines += [assigned(plan, let, printer) for let in (*inside, *phase.elements) if let.node.uid in wants]
    body = [*_scalar_lines(plan, step), *with_comments(lines, comment_mark="//")]
    if store.buffer == ROOT:
        head, result = "F root(const In &in, int i) const {", _f(printer, store.node)
    else:
        node = store.node
        factors = node.args if node.op == "mul" and node.uid not in printer.names else (node,)
        texts = [*(_f(printer, a) for a in factors), *(["F(1.0f)"] if len(factors) == 1 else [])]
        head, result = "Product times(F c, const In &in, int i) const {", f"{{{', '.join(texts)}}}"
    return [head, *(f"    {line}" for line in body), f"    return {result};", "}"], arrays, stages


def _given(step: Step) -> tuple[Node, bool]:
    """The node that an encoding begins with, and True if that is the root of the new value."""
    nodes = list(postorder([s.node for s in step.sweeps[-1].schedule.sweep.stores]))
    load = next((n for n in nodes if n.op == "load" and n.attr == X), ir.load(X, dtypes.f32, spaces.elem))
    users = [n for n in nodes if any(a is load for a in n.args)]
    stores = step.sweeps[-1].schedule.sweep.stores
    if len(users) == 1 and users[0].op == "sqrt" and all(s.node is not load for s in stores):
        return users[0], True
    return load, False


_DEFAULTS = {"NOISE": 0, "LOOPS": 1, "ROOT_LOOP": 0, "READS": 1, "DRAWS": 0, "KEPT": 0}
"""The constants of `Codec` in sweep.h, which a codec that has these numbers need not say."""


class _Encoder:
    """The members of a struct that stores: its constants, arrays and functions.

    arrays     name -> (type, size)
    heads      loop -> the struct of what it reads and finds of a block
    functions  (name, loop; -1 for a function of all loops) -> lines
    """

    def __init__(self, codec: Codec, step: Step) -> None:
        given, rooted = _given(step)
        self.given = codec.given
        plan = _CodecPhases(step.sweeps[-1].schedule, given, "new_")
        buffers = _buffers(codec)
        block = max((b.space.size or 1 for b in buffers), default=1)
        count = len(plan.phases)
        level = next((k for k, phase in enumerate(plan.phases) if any(s.buffer == ROOT for s in phase.stores)), 0)
        self.constants = {
            "NOISE": max((int(n.attr[1]) for n in plan.nodes if n.op == "draw"), default=0),
            "LOOPS": count,
            "ROOT_LOOP": level,
            "READS": sum(1 << k for k in range(count) if _reads_given(plan, k, given)),
            "DRAWS": sum(1 << k for k in range(count) if plan.draws(k)),
            "KEPT": len(plan.kept),
        }
        self.rooted = rooted
        few = _few(plan)
        size = f"most_of({block}) / {block}"
        kept = [(n, f"most_of({block})") for n in plan.kept] + [(n, size) for n in few]
        self.arrays = {plan.name[n.uid]: (f"alignas(64) {KEPT[type_of(n.dtype)]}", m) for n, m in kept}
        self.arrays |= {plan.name[n.uid]: ("I", size) for phase in plan.phases for n in phase.reductions}
        scalars = _scalar_lines(plan, step)
        self.simple = count == 1 and not plan.phases[0].blocks
        self.heads: dict[int, list[str]] = {}
        self.functions: dict[tuple[str, int], list[str]] = {}
        for k in range(count):
            self.heads[k], functions = _loop(plan, k, scalars, self.simple, {n.uid for n in few}, block)
            self.functions |= {(name, k): lines for name, lines in functions.items()}
        packed = [b for b in buffers if b.dtype.packed]
        if packed:
            texts = [f"no_codes<BLOCK>({b.name}_at, blocks, live);" for b in packed]
            texts += [f"pack<{b.dtype.bits}>({b.name}_packed, {b.name}_at, BLOCK * blocks);" for b in packed]
            head = "template <int BLOCK> void pack_codes(int blocks, const int *live) {"
            lines = [head, *(f"    {x}" for x in texts), "}"]
            self.functions["pack_codes", -1] = lines

    def _own(self, base: _Encoder) -> list[tuple[str, int]]:
        """Return the functions that differ from the base's, or take a struct that does."""
        differs = {k for k, head in self.heads.items() if base.heads.get(k) != head}
        return [
            x
            for x, lines in self.functions.items()
            if base.functions.get(x) != lines or (x[1] in differs and x[0] != "blocks")
        ]

    def extends(self, base: _Encoder) -> bool:
        """Return True if a struct may inherit from the base's: what that has more would be found too."""
        alike = all(self.arrays.get(name, of) == of for name, of in base.arrays.items())
        less = base.functions.keys() <= self.functions.keys() and self.rooted == base.rooted
        return alike and less and len(self._own(base)) < len(self.functions)

    def lines(self, struct: str, fields: str, base: _Encoder | None = None) -> list[str]:
        """Return the struct, which inherits from `fields`, the base's struct if there is one."""
        known = base.constants if base is not None else _DEFAULTS
        arrays = base.arrays if base is not None else {}
        constants = [f"{name} = {n}" for name, n in self.constants.items() if known.get(name) != n]
        new = self.given if base is None else []
        out = [f"struct {struct} : {fields} {{"]
        out += [f"    static constexpr int {', '.join(constants)};"] if constants else []
        out += ["    static constexpr bool ROOTED = true;"] if base is None and self.rooted else []
        out += [f"    {line}" for line in _arrays({x: of for x, of in self.arrays.items() if x not in arrays})]
        out += [f"    const float {', '.join(f'*__restrict new_{x}_at' for x in new)};"] if new else []
        out += [""] if len(out) > 1 else []
        out += _constructor(struct, fields, new) if new else [f"    using {fields}::{fields};"]
        functions = list(self.functions) if base is None else self._own(base)
        if base is not None:
            hidden = [x for x in ("blocks", "head", "tail", "encode") if x in {name for name, _ in functions}]
            out += [f"    using {', '.join(f'{fields}::{x}' for x in hidden)};"] if hidden else []
        elif not self.simple:
            out.append("    using Codec::blocks, Codec::head, Codec::tail;")
        for name, k in functions:
            head = self.heads[k] if name == "head" else []
            if base is not None and base.heads.get(k) == self.heads.get(k):
                head = []
            out += [f"    {line}" for line in (*head, *self.functions[name, k])]
        return [*out, "};"]


def _constructor(struct: str, fields: str, new: Sequence[str]) -> list[str]:
    """The constructor of a struct that stores with new values of rows and columns, behind the fields."""
    places = ["FIELDS - 1", "FIELDS", *(f"FIELDS + {k}" for k in range(1, len(new)))]
    made = [f"new_{x}_at((const float *)more[{at}])" for x, at in zip(new, places, strict=False)]
    head = f"    {struct}(char *first, char *const *more) : "
    return [head + ", ".join([f"{fields}(first, more)", *made]) + " {}"]


def _reads_given(plan: _CodecPhases, k: int, given: Node) -> bool:
    own = {let.node.uid for let in plan.phases[k].elements}
    seen: set[int] = set()
    stack = list(plan.phase_roots(k))
    while stack:
        n = stack.pop()
        if n is given:
            return True
        if n.uid in seen or (n.uid in plan.name and n.uid not in own and not plan._trivial(n)):
            continue
        seen.add(n.uid)
        stack.extend(plan.operands(n))
    return False


def _of_blocks(plan: _CodecPhases, k: int) -> list[Node]:
    """Return the blocks' values that the elements' loop k reads."""
    own = {let.node.uid for let in plan.phases[k].elements}
    return [n for n in plan.uses(plan.phase_roots(k), own) if n.space.name == "block"]


def _together(plan: _CodecPhases, k: int) -> list[Node]:
    """Return these values where the blocks' stage of that loop makes all of them, and the loop reduces nothing."""
    phase, found = plan.phases[k], _of_blocks(plan, k)
    made = {let.node.uid for let in phase.blocks}
    alike = all(n.uid in made and type_of(n.dtype) != "M" for n in found)
    return found if alike and not phase.reductions else []


def _few(plan: _CodecPhases) -> list[Node]:
    """Return the blocks' values that have arrays of their own."""
    read: set[int] = set()
    for k, phase in enumerate(plan.phases):
        if not _together(plan, k):
            read |= {n.uid for n in _of_blocks(plan, k)}
        own = {let.node.uid for let in phase.blocks} | {n.uid for n in phase.found}
        roots = [let.node for let in phase.blocks] + [s.node for s in phase.block_stores]
        read |= {n.uid for n in plan.uses(roots, own)}
    return [n for n in plan.across if n.uid in read and n.op not in ("block_max", "block_min")]


def _loop(
    plan: _CodecPhases, k: int, scalars: list[str], simple: bool, few: set[int], block: int
) -> tuple[list[str], dict[str, list[str]]]:
    """The struct and functions of loop k: the blocks' stage before it, its head and tail for a block, its work on
    elements."""
    together = {plan.name[n.uid]: type_of(n.dtype) for n in _together(plan, k)}
    phase, struct = plan.phases[k], list[str]()
    out: dict[str, list[str]] = {}
    if phase.found or phase.blocks or phase.block_stores:
        printer = CppPrinter(plan)
        lines: list[tuple[str, str]] = [(x, "") for x in scalars]
        for n in phase.found:
            name = plan.name[n.uid]
            lines.append((f"const I {name} = {'largest' if n.op == 'block_max' else 'smallest'}({name}_kept + b);", ""))
            printer.names[n.uid] = name
        reduced = {n.uid for n in phase.found}
        own = {let.node.uid for let in phase.blocks} | reduced
        roots = [let.node for let in phase.blocks] + [s.node for s in phase.block_stores]
        for n in plan.uses(roots, own - reduced):  # not what was reduced, which is of elements
            if n.uid in reduced:
                continue
            name = plan.name[n.uid]
            lines.append((f"const {type_of(n.dtype)} {name} = {read_kept(n, name, 'b')};", ""))
            printer.names[n.uid] = name
        lines += [assigned(plan, let, printer) for let in phase.blocks]
        lines += [(keep(n, plan.name[n.uid], "b"), "") for n in plan.across if n.uid in own and n.uid in few]
        lines += [(_set(f"Head_{k}", together), "")] if together else []
        lines += [(stored(plan, s, printer, "b"), "") for s in phase.block_stores]
        body = (f"    {x}" for x in with_comments(lines, comment_mark="//"))
        out["blocks"] = [f"void blocks(Loop<{k}>, int b) {{", *body, "}"]
    printer, head = CppPrinter(plan), []
    own = {let.node.uid for let in phase.elements}
    lines = [(x, "") for x in scalars]
    for n in plan.uses(plan.phase_roots(k), own):
        name = plan.name[n.uid]
        if n.space.name == "block":
            value = f"({name}_kept[b])" if type_of(n.dtype) != "M" else f" = I({name}_kept[b]) != I(0)"
            head.append((type_of(n.dtype), name, value))
            printer.names[n.uid] = f"h.{name}"
        else:
            lines.append((f"const {type_of(n.dtype)} {name} = {read_kept(n, name, 'i')};", ""))
            printer.names[n.uid] = name
    for n in phase.reductions:
        head.append(("I", plan.name[n.uid], f"({'INT32_MIN' if n.op == 'block_max' else 'INT32_MAX'})"))
    lines += [assigned(plan, let, printer) for let in phase.elements]
    for n in phase.reductions:
        name, better = plan.name[n.uid], "larger" if n.op == "block_max" else "smaller"
        lines.append((f"h.{name} = {better}<RAGGED>(h.{name}, {printer.text(n.args[0])}, i, end);", ""))
    lines += [(keep(n, plan.name[n.uid], "i"), "") for n in plan.kept if n.uid in own]
    root = "x"
    for s in phase.stores:
        if s.buffer == ROOT:
            root = _f(printer, s.node)
        else:
            lines.append((stored(plan, s, printer, "i"), ""))
    lines.append((f"return {root};", ""))
    kind = "Head" if simple else f"Head_{k}"
    if not simple:
        members = {name: t for t, name, _ in head}
        struct = _struct(f"Head_{k}", members, block if together else 0) if members else [f"struct Head_{k} {{}};"]
        order = [x for own in _by_kind(members).values() for x in own]
        values = {name: f"{t}{v}" if v.startswith("(") else v[3:] for t, name, v in head}
        found = f"of_head_{k}[b]" if together else f"{{{', '.join(values[x] for x in order)}}}"
        out["head"] = [f"Head_{k} head(Loop<{k}>, int{' b' if values else ''}) const {{ return {found}; }}"]
    if phase.reductions:
        ends = " ".join(f"{plan.name[n.uid]}_kept[b] = h.{plan.name[n.uid]};" for n in phase.reductions)
        out["tail"] = [f"void tail(Loop<{k}>, const Head_{k} &h, int b) {{ {ends} }}"]
    out["encode"] = [
        "template <bool RAGGED, int VALUE, class N> "
        f"F encode(Loop<{k}>, {kind} &h, int i, int end, F x, const N &noise) {{",
        *(f"    {line}" for line in with_comments(lines, comment_mark="//")),
        "}",
    ]
    return struct, out


__all__ = ["codec_structs", "table_lines"]
