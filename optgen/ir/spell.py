"""Names for host scalars that the author gave none: `1 - beta1**step` is one_minus_beta1_pow_t."""

from __future__ import annotations

from collections.abc import Mapping

from optgen.ir.node import Node

_WORDS = {"add": "plus", "sub": "minus", "mul": "times", "div": "over", "pow": "pow", "max": "max", "min": "min"}
LIMIT = 48  # characters; longer ones are numbered by the caller


def number(x: float) -> str:
    if x == int(x) and abs(x) < 10:
        word = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")[abs(int(x))]
        return word if x >= 0 else f"minus_{word}"
    return repr(int(x) if x == int(x) else x).replace("-", "m").replace(".", "p").replace("+", "")


def spell(node: Node, names: Mapping[int, str] | None = None, below: int = 0) -> str:
    """A Python identifier that reads as the expression; nodes in `names` (by uid) go by those.

    What is `below` more operations than LIMIT has a name that is too long, whatever it is: it is not read further.
    """
    if names and node.uid in names:
        return names[node.uid]
    if not node.args:
        return _leaf(node)
    if below > LIMIT:
        return "x" * (LIMIT + 1)
    if node.op == "where" and names is not None:
        return spell(node.args[1], names, below + 1)
    words = []
    for operand in node.args:
        words.append(spell(operand, names, below + 1))
        if len(words[0]) > LIMIT and node.op in _WORDS:
            return words[0]
    if node.op in _WORDS:
        return f"_{_WORDS[node.op]}_".join(words)
    return "_".join(["minus" if node.op == "neg" else node.op, *words])


def _leaf(node: Node) -> str:
    """Return the name of a node without operands."""
    if node.op == "const":
        return number(float(node.attr))
    return "t" if node.op == "sym" and node.attr == "step" else str(node.attr)


def name_for(node: Node, fallback: str, names: Mapping[int, str] | None = None) -> str:
    """`spell`, or the fallback where that would be longer than a line of maths should carry."""
    name = spell(node, names)
    if not name[0].isalpha():
        name = f"by_{name}"  # 0.1 * lr
    return name if len(name) <= LIMIT else fallback
