"""A rule as formulas in LaTeX, and in the MathML that browsers display without a script: from the trace, no SymPy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from optgen.ir.node import Node, postorder
from optgen.lang.plain import ATOM, POWER, PREFIX, let_names, number, statements
from optgen.lang.spec import Spec
from optgen.ops.prims import PRIMS

SUM, PRODUCT = 5, 6
GREEK = frozenset("alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi omega".split())
SYMBOLS = {"p": "theta", "exp_avg": "m", "exp_avg_sq": "v", "lr": "eta", "eps": "epsilon", "weight_decay": "lambda"}
"""Name in specs -> the field's letter, where the rule has no other value of that name."""

_THIN = '<mspace width="0.17em"/>'
_MARKS = {
    "*": (r"\,", _THIN), "@": (r"\,", _THIN), "+": ("+", "<mo>+</mo>"), "-": ("-", "<mo>&minus;</mo>"),
    "<": ("<", "<mo>&lt;</mo>"), ">": (">", "<mo>&gt;</mo>"), "<=": (r"\le", "<mo>&le;</mo>"),
    ">=": (r"\ge", "<mo>&ge;</mo>"), "==": ("=", "<mo>=</mo>"), "!=": (r"\ne", "<mo>&ne;</mo>"),
    "&": (r"\wedge", "<mo>&and;</mo>"), "|": (r"\vee", "<mo>&or;</mo>"), "^": (r"\oplus", "<mo>&oplus;</mo>"),
}  # fmt: skip
_FORMS: dict[str, tuple[str, str, int, tuple[int, ...]]] = {
    "div": (r"\frac{%s}{%s}", "<mfrac><mrow>%s</mrow><mrow>%s</mrow></mfrac>", PREFIX, (0, 0)),
    "sqrt": (r"\sqrt{%s}", "<msqrt>%s</msqrt>", ATOM, (0,)),
    "cbrt": (r"\sqrt[3]{%s}", "<mroot><mrow>%s</mrow><mn>3</mn></mroot>", ATOM, (0,)),
    "abs": (r"\left|%s\right|", "<mrow><mo>|</mo>%s<mo>|</mo></mrow>", ATOM, (0,)),
    "floor": (r"\lfloor %s \rfloor", "<mrow><mo>&lfloor;</mo>%s<mo>&rfloor;</mo></mrow>", ATOM, (0,)),
    "pow": ("%s^{%s}", "<msup><mrow>%s</mrow><mrow>%s</mrow></msup>", POWER, (ATOM, 0)),
    "power": ("%s^{%s}", "<msup><mrow>%s</mrow><mrow>%s</mrow></msup>", POWER, (ATOM, 0)),
    "exp2": ("2^{%s}", "<msup><mn>2</mn><mrow>%s</mrow></msup>", POWER, (0,)),
    "transpose": (r"%s^{\top}", "<msup><mrow>%s</mrow><mo>&#x22a4;</mo></msup>", POWER, (ATOM,)),
    "neg": ("-%s", "<mo>&minus;</mo>%s", PREFIX, (PREFIX,)),
    "not": (r"\neg %s", "<mo>&not;</mo>%s", PREFIX, (PREFIX,)),
    "where": (
        r"\begin{cases} %s & %s \\ %s & \text{otherwise} \end{cases}",
        "<mrow><mo>{</mo><mtable><mtr><mtd>%s</mtd><mtd>%s</mtd></mtr>"
        "<mtr><mtd>%s</mtd><mtd><mtext>otherwise</mtext></mtd></mtr></mtable></mrow>", ATOM, (0, 0, 0),
    ),
}  # fmt: skip
"""op -> LaTeX, MathML, how tightly the result binds, how tightly each operand has to; where: of the value first."""


class Formula(NamedTuple):
    """A formula in LaTeX and in MathML, and how tightly it binds, as `Prim.infix` says it."""

    latex: str
    mathml: str
    binds: int = ATOM

    def within(self, least: int) -> Formula:
        """Return it in parentheses if it binds less tightly."""
        if self.binds >= least:
            return self
        return Formula(rf"\left({self.latex}\right)", f"<mrow><mo>(</mo>{self.mathml}<mo>)</mo></mrow>")


class _Names:
    """The symbols of a rule's values."""

    def __init__(self, names: Sequence[str]) -> None:
        plain = {re.sub(r"\W.*", "", name) for name in names}
        self.letters = {name: symbol for name, symbol in SYMBOLS.items() if symbol not in plain}

    def formula(self, name: str) -> Formula:
        """Return `exp_avg[t-1]`, `g'`, `beta1` or `normal(0)` as a symbol with its primes and indices."""
        base, primes, time = re.fullmatch(r"(\w+)('*)(?:[\[(](.*)[\])])?", name).groups("")  # type: ignore[union-attr]
        word, digits = re.fullmatch(r"(.*?)(\d*)", base).groups()  # type: ignore[union-attr]
        word = self.letters.get(word, word)
        if word not in GREEK and len(word) > 1:
            word, digits = base, ""
        latex, mathml = (rf"\{word}", f"&{word};") if word in GREEK else (word, word)
        if len(latex) > 1 and word not in GREEK:
            latex = rf"\mathrm{{{latex.replace('_', chr(92) + '_')}}}"
        latex, mathml = latex.replace(r"\epsilon", r"\varepsilon"), f"<mi>{mathml}</mi>"
        below = ",".join(filter(None, (digits, time)))
        latex += primes + (f"_{{{below}}}" if below else "")
        sub = "".join(_leaf_tag(part) for part in re.findall(r"\w+|\W", below))
        sup = f"<mo>{'&prime;' * len(primes)}</mo>"
        if below and primes:
            return Formula(latex, f"<msubsup>{mathml}<mrow>{sub}</mrow>{sup}</msubsup>")
        if below:
            return Formula(latex, f"<msub>{mathml}<mrow>{sub}</mrow></msub>")
        return Formula(latex, f"<msup>{mathml}{sup}</msup>" if primes else mathml)


def _leaf_tag(part: str) -> str:
    tag = "mn" if part.isdigit() else "mi" if part.isalpha() else "mo"
    return f"<{tag}>{part.replace('-', '&minus;')}</{tag}>"


def _number(x: float | bool) -> Formula:
    text = number(x)
    if isinstance(x, bool):
        return Formula(rf"\text{{{text}}}", f"<mtext>{text}</mtext>")
    exact = text if "e" in text or abs(x) < 1e6 else f"{x:.14e}"
    digits, _, exponent = exact.partition("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    if not exponent:
        return Formula(digits, f"<mn>{digits}</mn>", ATOM if x >= 0 else PREFIX)
    power = f"<msup><mn>10</mn><mn>{int(exponent)}</mn></msup>"
    if digits == "1":
        return Formula(f"10^{{{int(exponent)}}}", power, POWER)
    return Formula(rf"{digits} \cdot 10^{{{int(exponent)}}}", f"<mn>{digits}</mn><mo>&sdot;</mo>{power}", PRODUCT)


def _made(node: Node, parts: list[Formula]) -> Formula:
    """Return the formula of a node whose operands are done."""
    if node.op in _FORMS:
        latex, mathml, binds, least = _FORMS[node.op]
        parts = [parts[1], parts[0], parts[2]] if node.op == "where" else parts
        inner = [part.within(need) for part, need in zip(parts, least, strict=True)]
        return Formula(latex % tuple(x.latex for x in inner), mathml % tuple(x.mathml for x in inner), binds)
    if (infix := PRIMS[node.op].infix) is not None:
        mark, binds, strict = infix
        if node.op in ("lt", "le") and node.args[0].op == "const":
            mark, parts = mark.replace("<", ">"), parts[::-1]
        left, right = parts[0].within(binds if binds > 1 else binds + 1), parts[1].within(binds + strict)
        latex, mathml = _MARKS[mark]
        if mark == "*" and right.binds == ATOM and rf"\, {left.latex}".endswith(rf"\, {right.latex}"):
            square = f"<msup><mrow>{right.mathml}</mrow><mn>2</mn></msup>"
            return Formula(f"{left.latex}^{{2}}", left.mathml.removesuffix(right.mathml) + square, binds)
        if mark == "*" and right.latex[0].isdigit():
            latex, mathml = r"\cdot", "<mo>&sdot;</mo>"
        return Formula(f"{left.latex} {latex} {right.latex}", left.mathml + mathml + right.mathml, binds)
    if reduction := re.fullmatch(r"(\w+)_(sum|max|min)", node.op):
        scope, kind = reduction.groups()
        (body,) = (part.within(PRODUCT) for part in parts)
        sign = "<mo>&sum;</mo>" if kind == "sum" else f"<mi>{kind}</mi>"
        under = f"<munder>{sign}<mtext>{scope}</mtext></munder>{_THIN}"
        return Formula(rf"\{kind}_{{\mathrm{{{scope}}}}} {body.latex}", under + body.mathml, SUM)
    name = str(node.attr if node.op == "call" else node.op.removeprefix("to_"))
    shown = rf"\{name}" if name in ("min", "max") else rf"\operatorname{{{name.replace('_', chr(92) + '_')}}}"
    listed = "<mo>,</mo>".join(x.mathml for x in parts)
    mathml = f"<mi>{escape(name)}</mi><mrow><mo>(</mo>{listed}<mo>)</mo></mrow>"
    return Formula(rf"{shown}\left({', '.join(x.latex for x in parts)}\right)", mathml)


def _expression(root: Node, known: Mapping[int, Formula]) -> Formula:
    done = dict(known)
    for node in postorder([root]):
        if node.uid in done:
            continue
        if node.op == "const":
            done[node.uid] = _number(node.attr)
        elif not node.args:
            done[node.uid] = Formula(rf"\mathrm{{{node.attr or node.op}}}", f"<mi>{node.attr or node.op}</mi>")
        else:
            done[node.uid] = _made(node, [done[a.uid] for a in node.args])
    return done[root.uid]


def symbols(spec: Spec) -> dict[str, Formula]:
    """Return the symbol of p, g, each state and each hyper-parameter."""
    names = ["p", "g", *(s.name for s in spec.kept), *(part for h in spec.hypers for part in h.parts)]
    read = _Names(names)
    return {name: read.formula(name) for name in names}


def formulas(spec: Spec, flags: Mapping[str, bool] | None = None) -> list[tuple[Formula, Formula]]:
    """Return (left, right) of each line of the rule, as `plain_formulas` has them."""
    trace = spec.trace(flags)
    names = _Names([*let_names(trace), *symbols(spec)])
    return [
        (names.formula(name), _expression(node, {uid: names.formula(x) for uid, x in known.items()}))
        for name, node, known, _ in statements(trace)
    ]
