"""The parser of the IR's text form (optgen/ir/show.py): `text(parse(text(x))) == text(x)`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from optgen.ir import node as ir
from optgen.ir.node import Node, postorder
from optgen.ir.program import Buffer, Let, Program, Store
from optgen.ops import dtypes, spaces

_TOKEN = re.compile(
    r"\s*(?:(?P<leaf>\$[\w.]+|@\w+|#extent\.\w+|%\w+:\w+(?:/\d+)?|-?inf|nan|true|false|-?\d[\d.e+-]*i?)"
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
    return int(word) if word.isdigit() else dtypes.ALL[word]


def _leaf(word: str, lets: Mapping[str, Node]) -> Node:
    if word[0] == "$":
        return ir.sym(word[1:])
    if word[0] == "@":
        return lets[word[1:]]
    if word[0] == "#":
        return ir.extent(word.removeprefix("#extent."))
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
