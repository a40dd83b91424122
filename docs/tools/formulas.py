"""The lines of a rule that `optgen explain` shows, in the MathML that browsers display without a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from html import escape

from optgen.lang.plain import plain_formulas
from optgen.lang.spec import Spec

GREEK = frozenset("alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi omega".split())
SYMBOLS = {"p": "theta", "exp_avg": "m", "exp_avg_sq": "v", "lr": "eta", "eps": "epsilon", "weight_decay": "lambda"}
"""Name in specs -> the field's letter, where the rule has no other value of that name."""
SUM, PRODUCT, PREFIX, POWER, ATOM = 5, 6, 7, 8, 9
"""The precedence of a formula, as in ops/prims.py; comparisons have 1, and the operators of bits 2, 3 and 4."""
PRIME = "\u02b9"
"""The prime of a name, as a letter that Python's parser takes."""
THIN = '<mspace width="0.17em"/>'
INFIX = {
    ast.Add: ("<mo>+</mo>", SUM), ast.Sub: ("<mo>&minus;</mo>", SUM), ast.Mult: (THIN, PRODUCT),
    ast.MatMult: (THIN, PRODUCT), ast.BitAnd: ("<mo>&and;</mo>", 4), ast.BitOr: ("<mo>&or;</mo>", 2),
    ast.BitXor: ("<mo>&oplus;</mo>", 3), ast.Lt: ("<mo>&lt;</mo>", 1), ast.Gt: ("<mo>&gt;</mo>", 1),
    ast.LtE: ("<mo>&le;</mo>", 1), ast.GtE: ("<mo>&ge;</mo>", 1), ast.Eq: ("<mo>=</mo>", 1),
    ast.NotEq: ("<mo>&ne;</mo>", 1),
}  # fmt: skip
CALLS = {
    "sqrt": "<msqrt>%s</msqrt>", "cbrt": "<mroot><mrow>%s</mrow><mn>3</mn></mroot>",
    "abs": "<mrow><mo>|</mo>%s<mo>|</mo></mrow>", "floor": "<mrow><mo>&lfloor;</mo>%s<mo>&rfloor;</mo></mrow>",
    "exp2": "<msup><mn>2</mn><mrow>%s</mrow></msup>",
}  # fmt: skip
CASES = "<mrow><mo>{</mo><mtable><mtr><mtd>%s</mtd><mtd>%s</mtd></mtr><mtr><mtd>%s</mtd><mtd><mtext>otherwise</mtext>"
CASES += "</mtd></mtr></mtable></mrow>"


class Writer:
    """MathML of expressions in Python, given the names of the rule's values."""

    def __init__(self, names: Sequence[str]) -> None:
        self.letters = {name: symbol for name, symbol in SYMBOLS.items() if symbol not in names}

    def name(self, text: str, below: str = "") -> str:
        """Return `beta1`, or g with a PRIME, as a symbol with its index and primes."""
        base, primes = text.rstrip(PRIME), "&prime;" * text.count(PRIME)
        word = base.rstrip("0123456789")
        digits = base[len(word) :]
        word = self.letters.get(word, word)
        if word not in GREEK and len(word) > 1:
            word, digits = base, ""
        symbol = f"<mi>{f'&{word};' if word in GREEK else word}</mi>"
        index = "".join(
            f"<{tag}>{part.replace('-', '&minus;')}</{tag}>"
            for part in re.findall(r"\w+|[^\w ]", ",".join(filter(None, (digits, below))))
            for tag in ("mn" if part.isdigit() else "mi" if part.isalpha() else "mo",)
        )
        if index and primes:
            return f"<msubsup>{symbol}<mrow>{index}</mrow><mo>{primes}</mo></msubsup>"
        if index:
            return f"<msub>{symbol}<mrow>{index}</mrow></msub>"
        return f"<msup>{symbol}<mo>{primes}</mo></msup>" if primes else symbol

    def read(self, text: str) -> str:
        """Return an expression of `plain_formulas`."""
        return self.write(ast.parse(text.replace("'", PRIME), mode="eval").body)

    def write(self, node: ast.expr, least: int = 0) -> str:
        """Return a formula, in parentheses if it binds less tightly than `least`."""
        text, binds = self.binding(node)
        return text if binds >= least else f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>"

    def binding(self, node: ast.expr) -> tuple[str, int]:
        """Return a formula, and how tightly it binds."""
        match node:
            case ast.Name(name):
                return self.name(name), ATOM
            case ast.Subscript(ast.Name(name), index):
                return self.name(name, ast.unparse(index)), ATOM
            case ast.Constant(value):
                return number(value)
            case ast.UnaryOp(op, operand):
                mark = "&minus;" if isinstance(op, ast.USub) else "&not;"
                return f"<mo>{mark}</mo>{self.write(operand, PREFIX)}", PREFIX
            case ast.BinOp(left, ast.Div(), right):
                return f"<mfrac><mrow>{self.write(left)}</mrow><mrow>{self.write(right)}</mrow></mfrac>", PREFIX
            case ast.BinOp(left, ast.Pow(), right):
                return f"<msup><mrow>{self.write(left, ATOM)}</mrow><mrow>{self.write(right)}</mrow></msup>", POWER
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                return self.infix(left, op, right)
            case ast.IfExp(condition, yes, no):
                return CASES % (self.write(yes), self.write(condition), self.write(no)), ATOM
            case ast.Call(ast.Name(name), arguments):
                return self.call(name, arguments)
        raise TypeError(f"a formula has {ast.dump(node)}")

    def infix(self, left: ast.expr, op: ast.AST, right: ast.expr) -> tuple[str, int]:
        mark, binds = INFIX[type(op)]
        a, b = self.write(left, max(binds, 2)), self.write(right, binds + (binds not in (2, 4)))
        if isinstance(op, ast.Mult):
            last = left.right if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mult) else left
            if ast.dump(last) == ast.dump(right) and self.binding(right)[1] not in (PREFIX, POWER):
                return f"{a.removesuffix(b)}<msup><mrow>{b}</mrow><mn>2</mn></msup>", binds
            words = re.findall(r"<mi>\w\w+(?=</mi>)", a)[-1:] and re.match(r"(<\w+>)*<mi>\w\w", b)
            mark = "<mo>&sdot;</mo>" if words or re.match("(<mrow>|<msup>)*<mn>", b) else mark
        return a + mark + b, binds

    def call(self, name: str, arguments: Sequence[ast.expr]) -> tuple[str, int]:
        if name in CALLS:
            return CALLS[name] % self.write(arguments[0]), POWER if name == "exp2" else ATOM
        if name == "transpose":
            return f"<msup><mrow>{self.write(arguments[0], ATOM)}</mrow><mo>&#x22a4;</mo></msup>", POWER
        if reduction := re.fullmatch(r"(\w+)_(sum|max|min)", name):
            sign = "<mo>&sum;</mo>" if reduction[2] == "sum" else f"<mi>{reduction[2]}</mi>"
            under = f"<munder>{sign}<mtext>{reduction[1]}</mtext></munder>{THIN}"
            return under + self.write(arguments[0], PRODUCT), SUM
        arguments = arguments[:1] if name == "newton_schulz" else arguments  # the others are hyper-parameters
        listed = "<mo>,</mo>".join(map(self.write, arguments))
        return f"<mi>{escape(name)}</mi><mrow><mo>(</mo>{listed}<mo>)</mo></mrow>", ATOM


def number(x: float | bool) -> tuple[str, int]:
    """Return a constant, and how tightly it binds."""
    if isinstance(x, bool):
        return f"<mtext>{x}</mtext>", ATOM
    digits, _, exponent = (f"{x:.15g}" if abs(x) < 1e6 else f"{x:.14e}").partition("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    power = f"<msup><mn>10</mn><mn>{int(exponent or 0)}</mn></msup>"
    if not exponent:
        return f"<mn>{digits}</mn>", ATOM
    return (power, POWER) if digits == "1" else (f"<mn>{digits}</mn><mo>&sdot;</mo>{power}", PRODUCT)


def symbols(spec: Spec) -> dict[str, str]:
    """Return the symbol of p, g, each state and each hyper-parameter."""
    names = ["p", "g", *(s.name for s in spec.kept), *(part for h in spec.hypers for part in h.parts)]
    return {name: Writer(names).name(name) for name in names}


def formulas(spec: Spec, flags: Mapping[str, bool] | None = None) -> list[tuple[str, str]]:
    """Return (left, right) of each line of the rule, as `plain_formulas` has them."""
    lines = [line.partition(" = ")[::2] for line in plain_formulas(spec, flags)]
    writer = Writer([*symbols(spec), *(re.sub(r"\W.*", "", left) for left, _ in lines)])
    return [(writer.read(left), writer.read(right)) for left, right in lines]
