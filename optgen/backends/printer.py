"""Expressions as text: precedence, names, the author's lines beside; a backend brings the spellings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter
from optgen.ir.program import Let
from optgen.ops.dtypes import in_f32
from optgen.ops.prims import PRIMS

ATOM = 100
# Python's precedence: (operator, level, whether the right operand needs parentheses at the same level)
INFIX: Mapping[str, tuple[str, int]] = {
    "mul": ("*", 20), "div": ("/", 20), "add": ("+", 10), "sub": ("-", 10), "shl": ("<<", 8), "shr": (">>", 8),
    "and": ("&", 7), "xor": ("^", 6), "or": ("|", 5), "lt": ("<", 4), "le": ("<=", 4), "eq": ("==", 4),
    "ne": ("!=", 4),
}  # fmt: skip

Text = tuple[str, int]  # an expression and how tightly it binds
Spelling = Callable[[Any, Node], Text]  # of a printer, of the kind whose spelling it is, and a node


@dataclass
class Printer:
    """Prints nodes; `names` gives the variable of every node bound so far, `spell` the backend's own forms.

    Operators that `spell` does not have are written infix.
    """

    spell: Mapping[str, Spelling]
    names: dict[int, str]

    def text(self, node: Node, level: int = 0) -> str:
        """The expression, in parentheses where it binds less tightly than `level`."""
        out, binds = self.express(node)
        return f"({out})" if binds < level else out

    def express(self, node: Node) -> Text:
        if node.uid in self.names:
            return self.names[node.uid], ATOM
        if node.op in self.spell:
            return self.spell[node.op](self, node)
        if node.op in INFIX:
            return self.infix(node)
        raise KeyError(f"no spelling for {node.op}")

    def infix(self, node: Node) -> Text:
        """Return an operation on two nodes with its sign between them."""
        sign, level = INFIX[node.op]
        a, b = node.args
        less = taken_away(node)
        sign, b = ("-", less) if less is not None else (sign, b)
        # Comparisons do not chain, shifts and differences do not associate: the right side is one tighter.
        return f"{self.operand(node, a, level + (level == 4))} {sign} {self.operand(node, b, level + 1)}", level

    def operand(self, user: Node, node: Node, level: int = 0) -> str:
        """Return an operand of `user`."""
        return self.text(node, level)

    def call(self, function: str, *args: Node) -> Text:
        return f"{function}({', '.join(self.text(a) for a in args)})", ATOM

    def bind(self, let: Let) -> str:
        """Return the let's expression; from here on its node is spelled as its name."""
        out, _ = self.express(let.node)
        self.names[let.node.uid] = let.name
        return out


def function(name: str, tail: str = "") -> Spelling:
    """Spell an operation as a call, its operands before `tail`."""
    return lambda p, n: (f"{name}({', '.join(p.operand(n, a) for a in n.args)}{tail})", ATOM)


def method(call: str) -> Spelling:
    """Spell an operation as something of its operand: `method("abs()")`."""
    return lambda p, n: (f"{p.text(n.args[0], ATOM)}.{call}", ATOM)


PATTERN = 1 << 15
"""Whole numbers from here on are masks, patterns of floats and factors of hashes: they are written in hex."""


def whole(value: int) -> str:
    """A whole number as Python and C++ text."""
    return hex(value) if value >= PATTERN else str(value)


def number(node: Node) -> str:
    """A constant as Python text; f32 constants are written as floats."""
    value = node.attr
    return whole(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)


COMMON: Mapping[str, Spelling] = {
    "const": lambda p, n: (number(n), ATOM if n.attr >= 0 else 30),
    "sym": lambda p, n: (str(n.attr), ATOM),
    "neg": lambda p, n: (f"-{p.text(n.args[0], 30)}", 30),
    "not": lambda p, n: (f"~{p.text(n.args[0], 30)}", 30),
}
"""The spellings that all Python texts share, but for those that each brings itself."""


def shortest(value: float) -> str:
    """The fewest decimals of an f32 number that are the number when they are rounded to f32."""
    texts = (repr(float(f"{value:.{digits}g}")) for digits in range(1, 18))
    return next(text for text in texts if in_f32(float(text)) == value)


def taken_away(node: Node) -> Node | None:
    """c where a sum adds -c, which is written as a difference."""
    if node.op != "add" or node.args[1].op != "const":
        return None
    value = node.args[1].attr
    lowest = -(1 << 31)
    return ir.const(-value, node.args[1].dtype) if lowest < value < 0 else None


def with_comments(lines: list[tuple[str, str]], limit: int = 116, comment_mark: str = "#") -> list[str]:
    """Code with its comments in one column, or above the code where both do not fit on a line."""
    width = max((len(code) for code, comment in lines if comment and len(code) < 72), default=0)
    out = []
    for code, comment in lines:
        if not comment:
            out.append(code)
        elif len(code) <= width and width + 4 + len(comment) <= limit:
            out.append(f"{code:<{width}}  {comment_mark} {comment}")
        else:
            out += [f"{comment_mark} {comment}", code]
    return out


def comment_of(let: Let) -> str:
    """The author's line number and line; nothing for a let that no author's line made."""
    return f"{let.loc.line}  {let.line}" if let.loc is not None and let.line else ""


def wrapped(head: str, names: Sequence[str], close: str = "):", whole: int = 116, limit: int = 115) -> list[str]:
    """head + names + close: one line of up to `whole` columns, or a new line each time `limit` columns are full."""
    one = head + ", ".join(names) + close
    if len(one) <= whole:
        return [one]
    out, line = [head], "    "
    for name in names:
        if len(line) + len(name) > limit:
            out.append(line.rstrip())
            line = "    "
        line += f"{name}, "
    return [*out, line.rstrip(), close]


def called(names: Iterable[str], lines: Iterable[str]) -> list[str]:
    """Return those of the functions that lines of code call."""
    text = "\n".join(line.partition("  # ")[0] for line in lines)
    return [*filter({*re.findall(r"(?<![.\w])(\w+)\(", text)}.__contains__, names)]


def _number(node: Node) -> Node:
    if node.args and all(a.op == "const" for a in node.args):
        row = PRIMS[node.op]
        meaning = row.number or row.operator
        assert meaning is not None
        return ir.const(float(meaning(*(a.attr for a in node.args))))
    return node


computed = Rewriter(_number)
"""Replaces functions of numbers alone by the number."""


def bound_lines(sweep_lets: tuple[Let, ...], printer: Printer) -> dict[str, list[tuple[str, str]]]:
    """Stage -> (code, comment) of every let, binding their names as they come."""
    lines: dict[str, list[tuple[str, str]]] = {"decode": [], "update": [], "encode": []}
    for let in sweep_lets:
        lines[let.stage].append((f"{let.name} = {printer.bind(let)}", comment_of(let)))
    return lines


def listed(name: str, numbers: tuple[float, ...]) -> list[str]:
    """A tuple of numbers under a name, lines of text."""
    return wrapped(f"{name} = (", [shortest(x) for x in numbers], ")", whole=120, limit=119)
