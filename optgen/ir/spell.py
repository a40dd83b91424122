"""Names for host scalars that the author gave none: `1 - beta1**step` is one_minus_beta1_pow_t."""

from __future__ import annotations

from optgen.ir.node import Node

_WORDS = {"add": "plus", "sub": "minus", "mul": "times", "div": "over", "pow": "pow", "max": "max", "min": "min"}
LIMIT = 48  # characters; longer ones are numbered by the caller


def number(x: float) -> str:
    if x == int(x) and abs(x) < 10:
        word = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")[abs(int(x))]
        return word if x >= 0 else f"minus_{word}"
    return repr(int(x) if x == int(x) else x).replace("-", "m").replace(".", "p").replace("+", "")


def spell(node: Node) -> str:
    """A Python identifier that reads as the expression."""
    if node.op == "const":
        return number(float(node.attr))
    if node.op == "sym":
        return "t" if node.attr == "step" else str(node.attr)
    if node.op == "neg":
        return f"minus_{spell(node.args[0])}"
    if node.op in _WORDS:
        a, b = (spell(x) for x in node.args)
        if node.op == "div" and a == "one":
            return f"one_over_{b}"
        return f"{a}_{_WORDS[node.op]}_{b}"
    return "_".join([node.op, *(spell(a) for a in node.args)])


def name_for(node: Node, fallback: str) -> str:
    """`spell`, or the fallback where that would be longer than a line of maths should carry."""
    name = spell(node)
    if not name[0].isalpha():
        name = f"by_{name}"  # 0.1 * lr
    return name if len(name) <= LIMIT else fallback
