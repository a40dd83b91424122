"""The text form of the IR, and its parser: `text(parse(text(x))) == text(x)`.

    add(mul($beta1, %exp_avg:f32), mul(1.0, @g))

`$name` is a host scalar, `%buffer:dtype` a load (with `/64` after it in block space), `@name` a let,
`#index` and `#key.name` the counter's leaves, `#extent.rows` a size of the tensor, numbers are f32, `3i` is
an i32; `cast<i32>(x)`, `block_max<64>(x)` carry an attribute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from optgen.ir import node as ir
from optgen.ir.node import Node, leaf, postorder, written
from optgen.ir.program import Buffer, Let, Program, Schedule, Store
from optgen.ops import dtypes, spaces, tables


def text(node: Node, names: Mapping[int, str] | None = None) -> str:
    """One node as text; nodes in `names` (by uid) are written as @name."""
    names = names or {}
    if node.uid in names:
        return f"@{names[node.uid]}"
    if not node.args:
        return leaf(node)
    return written(node, [text(a, names) for a in node.args])


def show(program: Program | Schedule) -> str:
    """A Program, line by line."""
    p = program.program if isinstance(program, Schedule) else program
    lines = [f"program {p.name} maths={p.maths} block={p.block}"]
    for b in p.buffers:
        access = ("r" if b.reads else "") + ("w" if b.writes else "")
        lines.append(f"buffer {b.name} {b.dtype} {b.space} {b.role} {b.owner} {access}")
    lines += [f"host {let.name} = {text(let.node)}" for let in p.host]
    names: dict[int, str] = {}
    for let in p.body:
        lines.append(f"{let.stage} {let.name} = {text(let.node, names)}")
        if let.node.args:
            names[let.node.uid] = let.name
    lines += [f"store {s.buffer} = {text(s.node, names)}" for s in p.stores]
    if isinstance(program, Schedule):
        parts = ", ".join(f"{part.reduction} {part.name}" for part in program.partials)
        lines.append(f"sweep 1 reads {' '.join(program.sweep.reads)}" + (f" reduces {parts}" if parts else ""))
    return "\n".join(lines) + "\n"


_TOKEN = re.compile(
    r"\s*(?:(?P<leaf>\$[\w.]+|@\w+|#index|#key\.\w+|#extent\.\w+|%\w+:\w+(?:/\d+)?|-?inf|nan|true|false|-?\d[\d.e+-]*i?)"
    r"|(?P<op>\w+)(?:<(?P<attr>\w+)>)?\(|(?P<punct>[,)]))"
)


def parse(source: str, lets: Mapping[str, Node] | None = None) -> Node:
    """The node that `text` wrote; `lets` gives the meaning of @names."""
    lets = lets or {}
    stack: list[tuple[str, object, list[Node]]] = [("", None, [])]
    pos = 0
    while pos < len(source.rstrip()):
        m = _TOKEN.match(source, pos)
        if m is None:
            raise ValueError(f"cannot read IR text at {source[pos : pos + 20]!r}")
        pos = m.end()
        if m["leaf"]:
            stack[-1][2].append(_leaf(m["leaf"], lets))
        elif m["op"]:
            stack.append((m["op"], _attr(m["attr"]), []))
        elif m["punct"] == ")":
            op, attr, args = stack.pop()
            stack[-1][2].append(ir.op(op, *args, attr=attr))
    if len(stack) != 1 or len(stack[0][2]) != 1:
        raise ValueError(f"unbalanced IR text {source!r}")
    return stack[0][2][0]


def _attr(word: str | None) -> object:
    if word is None:
        return None
    return int(word) if word.isdigit() else dtypes.ALL.get(word) or tables.known[word]


def _leaf(word: str, lets: Mapping[str, Node]) -> Node:
    if word[0] == "$":
        return ir.sym(word[1:])
    if word[0] == "@":
        return lets[word[1:]]
    if word == "#index":
        return ir.index()
    if word[0] == "#":
        kind, name = word[1:].split(".")
        return ir.key(name) if kind == "key" else ir.extent(name)
    if word[0] == "%":
        name, kind = word[1:].split(":")
        dtype, _, size = kind.partition("/")
        return ir.load(name, dtypes.ALL[dtype], spaces.block(int(size)) if size else spaces.elem)
    if word in ("true", "false"):
        return ir.const(word == "true", dtypes.boolean)
    if word.endswith("i"):
        return ir.const(int(word[:-1]), dtypes.i32)
    return ir.const(float(word))


def parse_program(source: str) -> Program:
    """The Program that `show` wrote (without comments, places and sweeps, which the text does not carry)."""
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("sweep ")]
    _, name, maths, block = lines[0].split()
    buffers, host, body, stores = [], [], [], []
    lets: dict[str, Node] = {}
    for line in lines[1:]:
        head, _, rest = line.partition(" ")
        if head == "buffer":
            label, dtype, space, role, owner, access = rest.split()
            kind, _, size = space.partition(":")
            where = spaces.block(int(size)) if size else spaces.Space(kind)
            buffers.append(
                Buffer(label, dtypes.ALL[dtype], where, role, owner, "r" in access, "w" in access)  # type: ignore[arg-type]
            )
            continue
        label, _, expression = rest.partition(" = ")
        node = parse(expression, lets)
        if head == "host":
            host.append(Let(label, node))
        elif head == "store":
            stores.append(Store(label, node))
        else:
            body.append(Let(label, node, head))  # type: ignore[arg-type]
            lets[label] = node
    hypers = {n.attr for n in postorder([x.node for x in (*body, *host)] + [s.node for s in stores]) if n.op == "sym"}
    return Program(
        name, tuple(buffers), tuple(host), tuple(body), tuple(stores),
        maths.partition("=")[2], int(block.partition("=")[2]), hypers=tuple(sorted(hypers)),  # type: ignore[arg-type]
    )  # fmt: skip
