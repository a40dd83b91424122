"""fold: constants and identities; in fast maths also products regrouped so that what varies least is multiplied first.

Every rule carries its licence.  EXACT rules keep the bits and run in both modes; ROUNDS rules change the
rounding (never by more than a few ulp of the result: each replaces one association of products, quotients
and roots by another) and run in fast mode only, where the names of those that fired are kept for the header.

rewrite (EXACT):
    x * 1 -> x        x - 0 -> x        -(-x) -> x        host constants are computed
rewrite (ROUNDS):
    group     a * (h * b) / s -> (a-free host and block factors first): one multiplication per element; a factor that
              stands there twice is scaled before it is squared, as an author writes (1 - beta2) * g * g; of two blocks'
              factors the second stays with its own element: their product may leave fp32's range where no element does
    root      sqrt(h * x) -> sqrt(h) * sqrt(x), h >= 0: the root of a state is shared by whoever needs it; of a square
              h * (x * x) it is sqrt(h) * abs(x)
    eps       a / (h * x + e) -> (a / h) / (x + e / h), h and e in host space
    step      h * a / (x + e) -> a / (x / h + e / h), h >= 0: the learning rate costs nothing; h < 2^-100 counts as 0,
              under which the denominator is infinite and the quotient 0; e counts as 2^-126 at least, so that 0 / 0
              of e = 0 is 0 where strict maths has NaN
    square    h * (b * x) * (b * x) -> (sqrt(h) * b * x) * (sqrt(h) * b * x), h >= 0 in host space, b per block: the
              factors meet x where a conversion can take them along
    distribute  h * (h1 * x + h2 * y) -> (h * h1) * x + (h * h2) * y where nothing else reads or stores the sum; not of
              h * (x - y), in which the author rounds no product: little but roundings would be left of x near y
    reciprocal  x / y -> x * rcp(y): 0 where y > 2^126, whose reciprocal is subnormal
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, is_const, postorder
from optgen.ir.program import GRAD_SCALE, Program
from optgen.ir.ranges import Intervals, never_zero
from optgen.ops import dtypes, spaces
from optgen.ops.prims import PRIMS


def exact(node: Node) -> Node:
    """Apply one EXACT rule to a node whose operands are done."""
    a = node.args
    if node.op == "where" and a[0].op == "const":
        return a[1] if a[0].attr else a[2]
    if node.op == "neg" and a[0].op == "neg":
        return a[0].args[0]
    if node.dtype is dtypes.f32:
        return _of_floats(node)
    if node.dtype is dtypes.boolean and any(x.op == "const" for x in a):
        return _of_truths(node)
    return _of_words(node) if node.dtype is dtypes.i32 else node


def _of_floats(node: Node) -> Node:
    a, op = node.args, node.op
    if op in ("add", "sub", "mul", "neg") and all(x.op == "const" for x in a):
        value = PRIMS[op].operator(*(x.attr for x in a))  # type: ignore[misc]
        return ir.const(value) if math.isfinite(value) else node
    if op in ("mul", "div") and is_const(a[1], 1.0):
        return a[0]
    if op == "mul" and is_const(a[0], 1.0):
        return a[1]
    if op == "sub" and is_const(a[1], 0.0) and math.copysign(1, a[1].attr) > 0:
        return a[0]
    return node


def _of_words(node: Node) -> Node:
    a = node.args
    if node.op == "and" and a[0].op == "lshr" and a[1].op == "const":
        shift = a[0].args[1].attr
        if 0 <= a[1].attr < 1 << (32 - shift):  # the mask drops what an arithmetic shift would bring in
            return ir.op("and", ir.op("shr", a[0].args[0], a[0].args[1]), a[1])
    if node.op in ("and", "or", "xor", "add", "sub", "shl", "shr", "lshr") and is_const(a[1], 0):
        return a[1] if node.op == "and" else a[0]
    return node


def _of_truths(node: Node) -> Node:
    """Return what `and`, `or`, `xor` and `not` of a known truth are: machines have no numbers among conditions."""
    first, last = node.args[0], node.args[-1]
    known, other = (first, last) if first.op == "const" else (last, first)
    if node.op in ("and", "or"):
        return other if known.attr == (node.op == "and") else known
    if node.op == "xor":
        return exact(ir.op("not", other)) if known.attr else other
    return ir.const(not known.attr, dtypes.boolean) if node.op == "not" else node


EXACT = Rewriter(exact)
"""The EXACT rules on whole expressions; nodes never change, so what was made of one is kept."""


FEW = ("model", "tensor", "mat", "row")
"""Spaces whose values all elements of a row share: a kernel multiplies them by scalars once for all of these."""


@dataclass
class Product:
    """host * block * (product of num) / (product of den)."""

    host: Node | None = None
    block: Node | None = None
    num: list[Node] = field(default_factory=list)
    den: list[Node] = field(default_factory=list)


def _mul(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a or b
    return exact(ir.op("mul", a, b))


def _div(a: Node | None, b: Node | None) -> Node | None:
    if b is None:
        return a
    if b.op == "div" and is_const(b.args[0], 1.0):
        return _mul(a, b.args[1])
    return exact(ir.op("div", a or ir.const(1.0), b))


def _sqrt(a: Node | None) -> Node | None:
    return None if a is None else ir.op("sqrt", a)


class Grouper:
    """The ROUNDS rules on products; `fired` collects their names."""

    def __init__(self, intervals: Intervals) -> None:
        self.intervals = intervals
        self.fired: set[str] = set()
        self.memo: dict[int, Product] = {}

    def product(self, node: Node) -> Product:
        if node.uid not in self.memo:
            self.memo[node.uid] = self._product(node)
        return self.memo[node.uid]

    def _product(self, node: Node) -> Product:
        if node.space == spaces.host:
            return Product(host=node)
        if node.space.name == "block" and node.op not in ("mul", "div", "neg"):
            return Product(block=node)
        if node.op == "neg":
            p = self.product(node.args[0])
            return replace(p, host=exact(ir.op("neg", p.host or ir.const(1.0))))
        if node.op == "mul":
            return self._of_mul(node)
        if node.op == "div":
            x, y = self.product(node.args[0]), self.denominator(node.args[1])
            if node.space == spaces.elem:
                x, y = self.apart(x, y)
            return Product(_div(x.host, y.host), _div(x.block, y.block), x.num + y.den, x.den + y.num)
        root = self._of_root(self.product(node.args[0])) if node.op == "sqrt" else None
        return root or Product(num=[node])

    def _of_mul(self, node: Node) -> Product:
        x, y = (self.product(a) for a in node.args)
        if node.args[0] is node.args[1] and x.num == [node.args[0]]:
            return Product(num=[node])  # a square that the author made first, such as that of a stored root
        if node.space == spaces.elem:
            x, y = self.apart(x, y)
        return Product(_mul(x.host, y.host), _mul(x.block, y.block), x.num + y.num, x.den + y.den)

    def _of_root(self, p: Product) -> Product | None:
        """Return the root of a product as that of its factors; None where it has one factor, or one below 0."""
        factors = [x for x in (p.host, p.block) if x is not None]
        # Below 0 the root of the product may exist where those of its factors do not.
        if not factors or not all(self.intervals(x)[0] >= 0 for x in factors):
            return None
        self.fired.add("root")
        if not p.den and len(p.num) == 2 and p.num[0] is p.num[1]:  # whose square may be too large
            value = p.num[0]
            size = value if self.intervals(value)[0] >= 0 else ir.op("abs", value)
            return Product(_sqrt(p.host), _sqrt(p.block), [size])
        inner = self.join(replace(p, host=None, block=None))
        return Product(_sqrt(p.host), _sqrt(p.block), [ir.op("sqrt", inner)] if inner else [])

    def apart(self, x: Product, y: Product) -> tuple[Product, Product]:
        """The two, of which at most one has a block's factor left; in the other it has met its own element.

        The elements of a block may be far smaller than its scale, or 0: a product of scales overflows where theirs
        does not.
        """
        if x.block is None or y.block is None:
            return x, y
        one, other = self.closed(x), self.closed(y)
        return (one if one.num == other.num else x), other

    def closed(self, p: Product) -> Product:
        """A product whose factors but the host's are one."""
        inner = self.join(replace(p, host=None))
        assert inner is not None
        return Product(p.host, num=[inner])

    def denominator(self, node: Node) -> Product:
        if node.op == "add" and node.space == spaces.elem:
            for x, e in (node.args, node.args[::-1]):
                p = self.product(x)
                if e.space == spaces.host and p.host is not None and never_zero(p.host, self.intervals):
                    self.fired.add("eps")
                    inner = self.join(replace(p, host=None))
                    assert inner is not None
                    return Product(host=p.host, num=[ir.op("add", inner, _div(e, p.host) or e)])
        return self.product(node)

    def step(self, p: Product) -> Product:
        """The host factor of a quotient, taken into its denominator."""
        if p.host is None or len(p.den) != 1 or p.den[0].op != "add" or self.intervals(p.host)[0] < 0:
            return p
        x, e = p.den[0].args
        if e.space != spaces.host or x.space != spaces.elem or self.intervals(e)[0] < 0:
            return p
        self.fired.add("step")
        zero, one, tiny = ir.const(0.0), ir.const(1.0), ir.const(2.0**-126)
        none = ir.op("lt", p.host, ir.const(2.0**-100))
        # x * 0 + Inf would be NaN where x has overflowed; x * 1 + Inf is Inf there too.
        inverse = ir.op("where", none, one, ir.op("div", one, p.host))
        infinite = ir.op("div", ir.op("max", e, tiny), ir.op("where", none, zero, p.host))
        return replace(p, host=None, den=[ir.op("add", ir.op("mul", x, inverse), infinite)])

    def join(self, p: Product) -> Node | None:
        """The node: host * block * num / den; None for 1."""
        scale, square = _mul(p.host, p.block), len({n.uid for n in p.num}) < len(p.num)
        few: list[Node] = []
        again: Node | None = None  # what of few values stands twice: its square may vanish where the product does not
        rest: list[Node] = []
        for n in p.num:
            if n.space.name not in FEW or p.block is not None:
                rest.append(n)
            elif n in few:
                again = _mul(again, n)
            else:
                few.append(n)
                scale = _mul(scale, n)
        if again is not None:
            rest.append(ir.op("mul", again, rest.pop()) if rest else again)
        # (h * g) * g rather than h * (g * g), which overflows where the product may not: as many instructions.
        out = scale if square else None
        if square and p.block is not None:  # b * x * g * g: a block's factor meets its element before what is squared
            rest = sorted(rest, key=rest.count)
        for n in rest:
            out = _mul(out, n)
        if not square:
            out = _mul(scale, out)
        den: Node | None = None
        for d in p.den:
            den = _mul(den, d)
        if den is not None:
            self.fired.add("reciprocal")
            out = _mul(out, ir.op("rcp", den))
        return out

    def square(self, p: Product) -> Node | None:
        """The root of a product that is the square of an element's value that has a block's factor."""
        if p.den or p.block is not None or len(p.num) != 2 or p.num[0] is not p.num[1]:
            return None
        inner = self.product(p.num[0])
        if inner.block is None or (p.host is not None and self.intervals(p.host)[0] < 0):
            return None
        return self.join(replace(inner, host=_mul(_sqrt(p.host), inner.host)))

    def __call__(self, node: Node) -> Node:
        if node.dtype is not dtypes.f32 or node.space != spaces.elem or node.op not in ("mul", "div", "neg", "sqrt"):
            return node
        p = self.product(node)
        if p.host is None and p.block is None and node.op != "div":
            return node
        root = self.square(p)
        if root is not None:
            self.fired.add("square")
            return ir.op("mul", root, root)
        new = self.join(self.step(p))
        if new is not None and new is not node:
            self.fired.add("group")
            return new
        return node


def distribute(program: Program, intervals: Intervals) -> tuple[Program, bool]:
    """h * (x + y) -> h * x + h * y where x and y have host factors for h to join and only this needs the sum."""
    uses = Counter(a.uid for n in postorder(program.roots()) for a in n.args)
    uses.update(s.node.uid for s in program.stores)
    scaled = Grouper(intervals)
    fired = False

    def rounds(p: Product) -> bool:
        """Return True unless the product is one value as it stands, such as a gradient or a negated one."""
        assert p.host is not None
        factors = [n for n in postorder([p.host]) if n.op not in ("neg", "mul")]
        return any(not is_const(n, -1.0) and n.attr != GRAD_SCALE for n in factors) or len(p.num) != 1 or bool(p.den)

    def rule(node: Node) -> Node:
        nonlocal fired
        if node.op == "mul" and node.space == spaces.elem and node.dtype is dtypes.f32:
            for h, total in (node.args, node.args[::-1]):
                if h.space == spaces.host and total.op in ("add", "sub") and uses[total.uid] == 1:
                    x, y = total.args
                    parts = [scaled.product(a) for a in (x, y) if a.space == spaces.elem]
                    if len(parts) == 2 and all(p.host for p in parts) and any(map(rounds, parts)):
                        fired = True
                        return ir.op(total.op, ir.op("mul", h, x), ir.op("mul", h, y))
        return node

    return program.map(Rewriter(rule)), fired


def fold(program: Program) -> Program:
    """See the module's docstring."""
    program = program.map(EXACT)
    program = replace(program, host_stores=tuple(x.of(EXACT(x.node)) for x in program.host_stores))
    if program.maths == "strict":
        return program
    intervals = Intervals(dict(program.ranges))
    program, distributed = distribute(program, intervals)
    group = Grouper(intervals)
    program = program.map(Rewriter(group))
    if distributed:
        group.fired.add("distribute")
    program = program.map(EXACT)
    return replace(program, rules=tuple(sorted({*program.rules, *group.fired})))
