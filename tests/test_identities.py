"""Fast maths by identities alone: rules before the passes and after them, in the integers modulo a prime.

Kernels are held to enclosures, which are as wide as roundings.  Here nothing is rounded: what is equal by identities is
equal, all else differs but for one draw in some 10^9, however small it is.  This is the idea of Triton's FpSan, with
quotients and roots too: sqrt(x) is x ** ((P + 1) / 4), that of a product the product of roots, and abs(x) sqrt(x * x).
Residues lie around 0: their order meets both sides of a condition.  A scalar of the host has its number, too, for its
conditions and as an exponent.  All else, such as exp, is a hash of its operands.  Not seen are overflow and underflow,
the definitions of exp and its like, codecs, and the text that is generated.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from optgen import passes
from optgen.driver import targets
from optgen.driver.compile import compile as compiled
from optgen.ir.node import Node, Rewriter, postorder
from optgen.ir.program import Program
from optgen.lang.spec import Spec
from optgen.lower import lower_rule
from optgen.ops import dtypes, spaces
from optgen.ops.prims import MATRIX_OPS, PRIMS, REDUCTIONS
from optgen.verify.differential import Trial
from optgen.verify.intervals import FAST
from tests import harness, product
from tests.ir_text import parse

P = (1 << 31) - 1
SIZES = {"1": 1, "b": 2, "m": 2, "n": 3, "s": 2, "l": 3, "r": 2}
DIMS = {"host": "", "model": "111", "tensor": "111", "mat": "b11", "row": "bm1", "col": "b1n", "elem": "bmn"}
AXES = {"row": -1, "col": -2, "mat": (-2, -1), "tensor": None, "model": None}
Scalar = tuple[Any, float]  # an array of residues, or of truths, and the number; NaN for what is not the host's


def shape_of(space: spaces.Space) -> tuple[int, ...]:
    return tuple(SIZES[d] for d in DIMS.get(space.name, f"b{space.name}"))


def mod(x: Any) -> Any:
    return (x + P // 2) % P - P // 2


def power(x: Any, exponent: int) -> Any:
    found = [pow(number, exponent % (P - 1), P) for number in np.ravel(x).tolist()]
    return mod(np.reshape(np.array(found, np.int64), np.shape(x)))


def hashed(*operands: Any) -> Any:
    out = np.zeros(1, np.uint64)
    for x in operands:
        out = (out ^ np.asarray(x).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        out ^= out >> np.uint64(29)
    return mod((out % np.uint64(P)).astype(np.int64))


def residue(x: float) -> Any:
    """Return the residue of a number to 15 digits, which is that of the product for a product of constants."""
    f = Fraction(f"{x:.15g}") if math.isfinite(x) else Fraction(1, 7)
    return np.asarray(mod(f.numerator * pow(f.denominator, -1, P)))


MEANS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: mod(x + y), "sub": lambda x, y: mod(x - y), "mul": lambda x, y: mod(x * y),
    "neg": lambda x: -x, "fma": lambda x, y, z: mod(x * y + z), "div": lambda x, y: mod(x * power(y, -1)),
    "rcp": lambda x: power(x, -1), "sqrt": lambda x: power(x, (P + 1) // 4), "abs": lambda x: power(x, (P + 1) // 2),
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "max": np.maximum, "min": np.minimum, "where": np.where,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "cast": lambda x: x,
}  # fmt: skip


def reduced(op: str, x: Any, of: spaces.Space) -> Any:
    (scope, kind), x = op.split("_"), np.broadcast_to(x, shape_of(of))
    return mod((x.sum if kind == "sum" else x.max)(AXES[scope], keepdims=True))


def residue_of(node: Node, number: float, operands: Sequence[Scalar]) -> Any:
    op, x, host = node.op, [value for value, _ in operands], node.space is spaces.host
    if op == "const" or host and node.dtype is dtypes.boolean:
        return np.asarray(bool(number)) if node.dtype is dtypes.boolean else residue(number)
    if op in ("min", "max") and host:
        return x[number != operands[0][1]]
    if op == "pow" and operands[1][1].is_integer():
        return power(x[0], int(operands[1][1]))
    if op in REDUCTIONS:
        return reduced(op, x[0], node.args[0].space)
    if op in MATRIX_OPS:
        shape = shape_of(node.space)
        x = [hashed(*(each for one in x for each in one.flat)), np.arange(math.prod(shape)).reshape(shape)]
    return MEANS[op](*x) if op in MEANS else hashed(zlib.crc32(f"{op} {node.attr}".encode()), *x)


def values(roots: Iterable[Node], known: Mapping[tuple[str, str], Scalar]) -> dict[Node, Scalar]:
    """Return the values of all nodes below the roots; those of leaves but constants are known."""
    out: dict[Node, Scalar] = {}
    for node in postorder(roots):
        if node.op in ("load", "sym", "extent"):
            out[node] = known[node.op, node.attr]
            continue
        operands, number = [out[a] for a in node.args], float(node.attr) if node.op == "const" else math.nan
        if node.space is spaces.host and node.args:
            means: Any = PRIMS[node.op].operator or PRIMS[node.op].number
            with suppress(ArithmeticError, ValueError):
                number = means(*(x for _, x in operands))
        out[node] = residue_of(node, number, operands), number
    return out


def drawn(spec: Spec, program: Program, seed: int) -> dict[tuple[str, str], Scalar]:
    """Return the buffers and scalars of a step: hyper-parameters by default, or any between 0 and 1."""
    draw = np.random.default_rng(seed)
    known = {("load", b.name): (mod(draw.integers(1, P, shape_of(b.space))), math.nan) for b in program.buffers}
    numbers = dict(zip(program.hypers, draw.integers(1, 256, len(program.hypers)) / 256, strict=True))
    if seed % 2:
        parts = [(k, v) for h in spec.hypers for k, v in zip(h.parts, np.ravel(h.default), strict=False)]
        numbers |= {k: float(v) for k, v in parts if isinstance(v, float | int) and v}
    numbers |= {"rows": 2.0, "columns": 3.0, "elements": 12.0, "stream": 7.0}
    numbers["step"] = draw.integers(1, 10 ** draw.integers(1, 6))
    return known | {(op, k): (residue(x), float(x)) for k, x in numbers.items() for op in ("sym", "extent")}


def differing(spec: Spec, fold: Any = passes.fold) -> set[str]:
    """Return what a rule keeps differently after the passes of fast maths, under any setting of its flags."""
    found = set()
    with patch.object(passes, "PROGRAM_PASSES", (fold, *passes.PROGRAM_PASSES[2:])):
        steps = [(x, passes.step(x, "fast")) for x in (lower_rule(spec, flags) for flags in spec.settings())]
    for (program, step), seed in itertools.product(steps, range(6)):
        before = drawn(spec, program, seed)
        host = values([let.node for let in step.host], before)
        after = before | {("sym", let.name): host[let.node] for let in step.host}
        for p in (stage.schedule.program for stage in step.stages):
            made = values([s.node for s in p.stores], after)
            for b, node in [(p.buffer(s.buffer), s.node) for s in p.stores]:
                if node.op == "bitcast":  # to bf16, rounded: where(x == x, ..., NaN)
                    node = next(n.args[0] for n in postorder([node]) if n.op == "eq")
                x = made[node][0]
                after["load", b.name] = reduced(b.reduction, x, p.space) if b.role == "partial" else x, math.nan
        exact = values([s.node for s in program.stores], before)
        found |= {s.buffer for s in program.stores if not np.all(exact[s.node][0] == after["load", s.buffer][0])}
    return found


@pytest.mark.parametrize("rule", product.WITH_MATRICES)
def test_fast_maths_is_the_rule_by_identities(rule: str) -> None:
    assert not differing(harness.spec_of(rule))


DECAY, POWER = "sub(1.0, mul($lr, $weight_decay))", "pow($beta2, $step)"
WRONG = (
    ("adamw", DECAY, "div(1.0, add(1.0, mul($lr, $weight_decay)))", False),
    ("adamw", DECAY, f"where(lt(mul($lr, $weight_decay), 1e-4), 1.0, {DECAY})", True),
    ("adamw", POWER, f"where(lt($step, 1000.0), {POWER}, pow($beta2, sub($step, 1.0)))", True),
    ("adamw", POWER, f"where(lt($step, 90000.0), {POWER}, 0.0)", False),
    ("adamw", "$eps", "mul(1.0000001, $eps)", False),
    ("adamw", "sub(1.0, $beta2)", "sub(1.0, mul(1.0000001, $beta2))", True),
    ("came", "$eps2", "0.0", False),
    ("adalite", "$eps2", "0.0", True),
)
"""A rule, a node that fast maths makes of it, a wrong one in its place, and whether enclosures notice it."""
seeded = pytest.mark.parametrize(("rule", "right", "wrong", "enclosed"), WRONG)


def folding(right: str, wrong: str) -> Callable[[Program], Program]:
    """Return a pass `fold` that in fast maths makes a wrong rewrite, too."""
    rewrite = Rewriter(lambda node: parse(wrong) if node is parse(right) else node)
    return lambda p: passes.fold(p).map(rewrite) if p.maths == "fast" else passes.fold(p)


@seeded
def test_a_wrong_rewrite_is_noticed(rule: str, right: str, wrong: str, enclosed: bool) -> None:
    assert differing(harness.spec_of(rule), folding(right, wrong))


def is_enclosed(rule: str, fold: Callable[[Program], Program], **options: float) -> bool:
    """Return True for enclosed steps of a C++ kernel: six first and six late ones, with gradients of three sizes."""
    plan, spec, draw = harness.plan_of("fp32"), replace(harness.spec_of(rule)), torch.Generator().manual_seed(0)
    with patch.object(passes, "PROGRAM_PASSES", (passes.decompose, fold, *passes.PROGRAM_PASSES[2:])):
        cls = compiled(spec, plan, "fast")
    for step, size in itertools.product((0, 3000), (1.0, 1e-3, 1e-6)):
        start, given = torch.randn(9, 70, generator=draw), {"plan": "fp32", "backend": "cpp", "options": options}
        trial = Trial(cls, spec, start, model=FAST, step=step, **given)
        storage = trial.storage(plan, targets.recurrences_of(spec, tuple(sorted(trial.flags.items()))))
        if not all(trial.check_step(storage, g).ok for g in torch.randn(6, 9, 70, generator=draw) * size):
            return False
    return True


@pytest.mark.full
@seeded
def test_enclosures_notice_those_that_are_larger(rule: str, right: str, wrong: str, enclosed: bool) -> None:
    assert is_enclosed(rule, passes.fold) and is_enclosed(rule, folding(right, wrong)) != enclosed
