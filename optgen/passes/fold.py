"""fold: constants and identities; in fast maths also products regrouped so that what varies least is multiplied first.

Every rule carries its licence.  EXACT rules keep the bits and run in both modes; ROUNDS rules change the
rounding (never by more than a few ulp of the result: each replaces one association of products, quotients
and roots by another) and run in fast mode only, where the names of those that fired are kept for the header.

rewrite (EXACT):
    x * 1 -> x        x - 0 -> x        -(-x) -> x        host constants are computed
rewrite (ROUNDS):
    group     a * (h * b) / s -> (a-free host and block factors first): one multiplication per element
    root      sqrt(h * x) -> sqrt(h) * sqrt(x): the root of a state is shared by whoever needs it
    eps       a / (h * x + e) -> (a / h) / (x + e / h), h and e in host space
    reciprocal  x / y -> x * rcp(y)
    fma       x * y + z -> fma(x, y, z)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from optgen.ir import node as ir
from optgen.ir.node import Node, Rewriter, is_const, postorder
from optgen.ir.program import Program
from optgen.ir.ranges import never_zero
from optgen.ops import dtypes, spaces

_PY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def exact(node: Node) -> Node:
    """One EXACT step at a node whose operands are done."""
    a = node.args
    if node.op in _PY and all(x.op == "const" for x in a) and node.dtype is dtypes.f32:
        value = _PY[node.op](*(x.attr for x in a))
        return ir.const(value) if math.isfinite(value) else node
    if node.op == "mul" and node.dtype is dtypes.f32:
        if is_const(a[1], 1.0):
            return a[0]
        if is_const(a[0], 1.0):
            return a[1]
    if node.op == "div" and is_const(a[1], 1.0):
        return a[0]
    if node.op == "sub" and is_const(a[1], 0.0) and math.copysign(1, a[1].attr) > 0:
        return a[0]
    if node.op == "neg" and a[0].op == "neg":
        return a[0].args[0]
    if node.op == "where" and a[0].op == "const":
        return a[1] if a[0].attr else a[2]
    if node.op == "and" and a[0].op == "lshr" and a[1].op == "const":
        shift = a[0].args[1].attr
        if 0 <= a[1].attr < 1 << (32 - shift):  # the mask drops what an arithmetic shift would bring in
            return ir.op("and", ir.op("shr", a[0].args[0], a[0].args[1]), a[1])
    if node.op in ("and", "or", "xor", "add", "sub") and node.dtype is dtypes.i32 and is_const(a[1], 0):
        return a[1] if node.op == "and" else a[0]
    return node


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

    def __init__(self) -> None:
        self.fired: set[str] = set()
        self.memo: dict[int, Product] = {}

    def product(self, node: Node) -> Product:
        found = self.memo.get(node.uid)
        if found is None:
            found = self.memo[node.uid] = self._product(node)
        return found

    def _product(self, node: Node) -> Product:
        if node.space == spaces.host:
            return Product(host=node)
        if node.space.name == "block" and node.op not in ("mul", "div", "neg"):
            return Product(block=node)
        if node.op == "neg":
            p = self.product(node.args[0])
            return replace(p, host=exact(ir.op("neg", p.host or ir.const(1.0))))
        if node.op == "mul":
            x, y = (self.product(a) for a in node.args)
            return Product(_mul(x.host, y.host), _mul(x.block, y.block), x.num + y.num, x.den + y.den)
        if node.op == "div":
            x, y = self.product(node.args[0]), self.denominator(node.args[1])
            return Product(_div(x.host, y.host), _div(x.block, y.block), x.num + y.den, x.den + y.num)
        if node.op == "sqrt":
            p = self.product(node.args[0])
            if p.host is not None or p.block is not None:
                self.fired.add("root")
                inner = self.join(replace(p, host=None, block=None))
                return Product(_sqrt(p.host), _sqrt(p.block), [ir.op("sqrt", inner)] if inner else [])
        return Product(num=[node])

    def denominator(self, node: Node) -> Product:
        if node.op == "add" and node.space == spaces.elem:
            for x, e in (node.args, node.args[::-1]):
                p = self.product(x)
                if e.space == spaces.host and p.host is not None and never_zero(p.host):
                    self.fired.add("eps")
                    inner = self.join(replace(p, host=None))
                    assert inner is not None
                    return Product(host=p.host, num=[ir.op("add", inner, _div(e, p.host) or e)])
        return self.product(node)

    def join(self, p: Product) -> Node | None:
        """The node: (host * block) * (num / den); None for 1."""
        num: Node | None = None
        for n in p.num:
            num = _mul(num, n)
        den: Node | None = None
        for d in p.den:
            den = _mul(den, d)
        out = _mul(_mul(p.host, p.block), num)
        if den is not None:
            self.fired.add("reciprocal")
            out = _mul(out, ir.op("rcp", den))
        return out

    def __call__(self, node: Node) -> Node:
        if node.dtype is not dtypes.f32 or node.space != spaces.elem or node.op not in ("mul", "div", "neg", "sqrt"):
            return node
        p = self.product(node)
        if p.host is None and p.block is None and node.op != "div":
            return node
        new = self.join(p)
        if new is not None and new is not node:
            self.fired.add("group")
            return new
        return node


def _fuse(program: Program) -> tuple[Program, bool]:
    """x * y + z -> fma(x, y, z) where the product has no other user."""
    uses = Counter(a.uid for n in postorder(program.roots()) for a in n.args)
    uses.update(s.node.uid for s in program.stores)
    fired = False
    memo: dict[int, Node] = {}

    def fuse(old: Node, x: Node, y: Node) -> Node | None:
        """The fma for `old`, whose operands have become x and y."""
        negate = old.op == "sub"
        if y.op == "mul" and uses[old.args[1].uid] <= 1 and y.space == spaces.elem:
            a, b = y.args
            return ir.op("fma", exact(ir.op("neg", a)) if negate else a, b, x)
        if x.op == "mul" and uses[old.args[0].uid] <= 1 and x.space == spaces.elem:
            return ir.op("fma", *x.args, exact(ir.op("neg", y)) if negate else y)
        return None

    def walk(root: Node) -> Node:
        nonlocal fired
        for node in postorder([root]):
            if node.uid in memo:
                continue
            args = [memo[a.uid] for a in node.args]
            made = None
            if node.op in ("add", "sub") and node.dtype is dtypes.f32 and node.space == spaces.elem:
                made = fuse(node, *args)
                fired = fired or made is not None
            memo[node.uid] = made or (ir.rebuild(node, args) if args else node)
        return memo[root.uid]

    return program.map(walk), fired


def fold(program: Program) -> Program:
    """See the module's docstring."""
    program = program.map(Rewriter(exact))
    program = replace(
        program, host_stores=tuple(replace(x, node=Rewriter(exact)(x.node)) for x in program.host_stores)
    )
    if program.maths == "strict":
        return program
    group = Grouper()
    program = program.map(Rewriter(group))
    program = program.map(Rewriter(exact))
    program, fused = _fuse(program)
    fired = group.fired | ({"fma"} if fused else set())
    return replace(program, rules=tuple(sorted(fired)))
