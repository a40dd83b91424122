"""Random programs: a rule and a plan as text, some steps of it on every backend, and an oracle of its own.

`cases()` is a Hypothesis strategy of `Case`s; `run` builds one and raises AssertionError where

- strict kernels have other bits than the eager reference (NaN and the codes of its block aside);
- a step leaves the enclosure that optgen.verify derives for it, in strict maths or in fast;
- the fp64 result of the same text, executed on NumPy under the names below, is not inside the rule's own enclosure;
- a program is refused without a place, or anything else is raised.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

import optgen.formats
import optgen.lang
from optgen.base.errors import UserError
from optgen.driver import targets
from optgen.driver.compile import compile as compiled
from optgen.lang.declare import INPUT
from optgen.runtime.cpu import native
from optgen.verify.differential import Trial, Values, compare, enclose, reading
from optgen.verify.intervals import FAST, STRICT, Interval
from tests import harness

ISAS = [isa.name for isa in native.ISAS if isa.needs <= native.cpu_flags()]
VECTORS = ((1,), (), (63,), (331,), (0,), (64,), (1029,))
MATRICES = ((3, 70), (5, 7), (1, 130), (65, 1), (2, 3, 35), (4, 3, 3, 3), (16, 64), (2, 1, 9), (2, 9, 12))


@dataclass(frozen=True)
class Case:
    """A program and the numbers of a run.

    text     a module with the rule `drawn` and the plan `plan`
    options  hyper-parameters and flags that differ from their defaults
    scale    power of ten of gradients; spread: powers of ten between elements; zeros: share of zeros
    special  whether some gradients are infinite or NaN
    isa      of C++ kernels, counted from the widest that this machine has
    kernels  what is run beside the strict reference: strict "triton", strict "cpp", "fast" kernels of both
    """

    text: str
    shapes: tuple[tuple[int, ...], ...] = ((3, 70),)
    options: Mapping[str, Any] = field(default_factory=dict)
    param: str = "float32"
    grad: str = "float32"
    scale: int = 0
    spread: int = 0
    zeros: float = 0.0
    special: bool = False
    steps: int = 1
    isa: int = 0
    seed: int = 0
    kernels: str = "triton cpp fast"

    def __str__(self) -> str:
        """Return the case as a file of tests/cases/programs has it."""
        plain = asdict(Case(""))
        rest = {k: v for k, v in asdict(self).items() if k != "text" and v != plain[k]}
        return f"{self.text}\nCASE = dict({', '.join(f'{k}={v!r}' for k, v in rest.items())})\n"


def read(text: str) -> Case:
    """Read what str(case) wrote."""
    program, _, rest = text.partition("\nCASE = ")
    return Case(program, **eval(rest, {"dict": dict}))


# -- rules

LOWER = {
    "elem": ("row", "col", "mat", "tensor", "model", "host"), "row": ("mat", "tensor", "model", "host"),
    "col": ("mat", "tensor", "model", "host"), "mat": ("tensor", "model", "host"), "tensor": ("model", "host"),
    "model": ("host",), "host": (),
}  # fmt: skip
OF_MATRICES = ("row", "col", "mat")
STATES = {"elem": "state", "row": "row", "col": "col", "mat": "mat", "tensor": "tensor_state", "model": "model_state"}
STATISTICS = {
    "row": ("row_mean", "row_sum", "row_max"), "col": ("col_mean", "col_sum", "col_max"),
    "mat": ("mat_mean", "mat_max", "mat_norm"), "tensor": ("mean", "total", "amax", "norm", "rms"),
    "model": ("model_total", "model_norm"),
}  # fmt: skip
NORMS = ("mat_norm", "norm", "rms", "model_norm")


OF_WHOLE = ("low", "low_sq", "left", "basis", "upper")


class Writer:
    """Draws the text of a rule; knows which names have a value of which space, and which are never negative."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.names: dict[str, list[str]] = {space: [] for space in LOWER} | {"elem": ["g", "p"]}
        self.nonneg: dict[str, list[str]] = {space: [] for space in LOWER}
        self.states: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.hypers = {"lr": "hyper(1e-2, ge=0)"}
        self.lines: list[str] = []
        self.spaces = {"elem", "host"}  # in which values may be made here
        self.takes_step = False
        self.wide = False  # matrices are kept of the shorter and the longer side

    def pick(self, *of: Any) -> Any:
        return self.draw(st.sampled_from(of))

    def count(self, most: int) -> int:
        return self.draw(st.integers(0, most))

    def hyper(self, kind: str, text: str) -> str:
        """Return the name of a hyper-parameter, a new one or one that is there."""
        name = f"{kind}{self.count(1) or ''}"
        self.hypers.setdefault(name, text)
        return name

    def beta(self) -> str:
        if self.count(3):
            return self.hyper("beta", "hyper(0.9, ge=0, lt=1)")
        self.hypers.setdefault("betas", "hyper((0.9, 0.99), ge=0, lt=1)")
        return self.pick("b1", "b2")

    def step(self) -> str:
        self.takes_step = True
        return "t"

    def decay(self) -> str:
        """Return a number of [0, 1) of the host."""
        forms = (self.beta, lambda: "0.9", lambda: f"(1 - {self.beta()} ** {self.step()})", lambda: "0.99")
        return self.pick(*forms)()

    # values

    def leaf(self, space: str) -> str:
        if space == "host":
            number = self.pick("2.0", "0.5", "1.0", "0.1", "-1.0", "3.0", "1e-3", "1e4")
            return self.pick(lambda: number, lambda: "lr", self.beta, self.step, *map(_always, self.names["host"]))()
        own = [*self.names[space], *self.nonneg[space]]
        return self.pick(*own) if own else self.statistic(space, 0, False) if space != "elem" else "g"

    def positive_leaf(self, space: str) -> str:
        if space == "host":
            return self.pick(lambda: self.pick("1.0", "0.5", "0.1", "2.0"), lambda: "lr", self.decay, self.step)()
        own = self.nonneg[space]
        return self.pick(*own) if own else f"abs({self.leaf(space)})"

    def lower(self, space: str, nonneg: bool, depth: int) -> str:
        """Return a value of this space or of a smaller one."""
        spaces = [s for s in LOWER[space] if s in self.spaces]
        return self.value(self.pick(space, *reversed(spaces)), depth, nonneg)

    def statistic(self, space: str, depth: int, nonneg: bool) -> str:
        below = ["elem"] + [s for s in ("row", "col") if s in self.spaces and space in ("mat", "tensor")]
        of = self.pick(*below)
        name = self.pick(*STATISTICS[space])
        if of != "elem" and name in ("mat_norm",):
            name = "mat_mean"
        x = self.full(of, depth, nonneg and name not in NORMS)
        two = {"total": "dot", "model_total": "model_dot"}.get(name)
        if two and not nonneg and of == "elem" and self.count(1):
            return f"{two}({x}, {self.full(of, depth, False)})"
        return f"{name}({x})"

    def full(self, space: str, depth: int, nonneg: bool) -> str:
        """Return a value that has one for each entry of a space, whatever it is made of."""
        leaf = self.positive_leaf(space) if nonneg else self.leaf(space)
        if not depth or self.count(1):
            return leaf
        return f"({leaf} {self.pick('+', '*')} {self.lower(space, nonneg, depth - 1)})"

    def value(self, space: str, depth: int, nonneg: bool = False) -> str:
        """Return an expression; of host scalars, too, one that is finite for small numbers."""
        if not depth:
            return self.positive_leaf(space) if nonneg else self.leaf(space)
        low: Callable[..., str] = lambda nonneg=nonneg: self.lower(space, nonneg, depth - 1)  # noqa: E731
        own: Callable[..., str] = lambda nonneg=nonneg: self.value(space, depth - 1, nonneg)  # noqa: E731
        forms = [
            lambda: own(), lambda: f"({own()} + {low()})", lambda: f"({low()} * {own()})",
            lambda: f"({own()} / {self.above(space, depth - 1)})",
            lambda: f"where({self.condition(space, depth - 1)}, {own()}, {low()})",
            lambda: f"maximum({own()}, {low()})", lambda: f"minimum({own()}, {low()})",
        ]  # fmt: skip
        if nonneg:
            forms += [
                lambda: f"sqrt({own()})", lambda: f"abs({own(False)})", lambda: f"square({own(False)})",
                lambda: f"{own()} ** {self.pick('0.5', '1.5', '2', '0.25', '3')}", lambda: f"cbrt({own()})",
                lambda: f"rsqrt({self.above(space, depth - 1)})",
                lambda: f"power({own()}, {self.pick('0.5', '0.75', '2.0')})",
                lambda: self.pick("sigmoid({})", "exp(-abs({}))", "2.0 ** -abs({})").format(own(False)),
            ]  # fmt: skip
        else:
            forms += [
                lambda: f"({own()} - {low()})", lambda: f"-{self.leaf(space)}", lambda: f"sign({own()})",
                lambda: f"cbrt({own()})", lambda: f"clip({own()}, -1.0, {self.pick('1.0', '0.5', '100.0')})",
                lambda: f"{self.pick('floor', 'rint')}(clip({own()}, -1e3, 1e3))", lambda: f"{self.leaf(space)} ** 3",
                lambda: f"tanh({own()})", lambda: f"log({self.above(space, depth - 1)})",
                lambda: f"atan2({own()}, {low()})",
            ]  # fmt: skip
        if space == "host":
            forms += [
                lambda: f"{self.decay()} ** {self.step()}", lambda: f"exp(-{own(True)})",
                lambda: f"log(1 + {own(True)})", lambda: f"minimum({self.step()}, 5.0)",
            ]  # fmt: skip
        elif space != "elem":
            forms += [lambda: self.statistic(space, depth - 1, nonneg)] * 4
        else:
            forms += [lambda: f"({self.lower(space, nonneg, depth - 1)} * {self.full(space, 0, nonneg)})"] * 2
        return self.pick(*forms)()

    def above(self, space: str, depth: int) -> str:
        """Return a value above 0."""
        eps = self.pick(lambda: self.hyper("eps", "hyper(1e-8, gt=0)"), lambda: "1e-3", lambda: "1e-15", lambda: "1.0")
        return f"({self.lower(space, True, depth)} + {eps()})"

    def condition(self, space: str, depth: int) -> str:
        x, y = self.value(space, depth), self.lower(space, False, 0)
        forms = (
            lambda: f"{x} > {y}", lambda: f"{x} <= {y}", lambda: f"equal({x}, {y})", lambda: f"~({x} < {y})",
            lambda: f"({x} > {y}) & ({self.value(space, 0)} < 1.0)", lambda: f"({x} >= {y}) | ({y} < 0.0)",
        )  # fmt: skip
        return self.pick(*forms)()

    # statements

    def update(self, state: str, space: str, nonneg: bool) -> list[str]:
        """Return what becomes of a state."""
        beta, x = self.decay(), self.value(space, self.count(2), nonneg)
        forms = [f"{beta} * {state} + (1 - {beta}) * {x}", x, f"{state} + {x}"]
        forms += [f"where({self.step()} > 1, {forms[0]}, {x})"] if space != "host" else []
        forms += [f"maximum({beta} * {state}, {x})", f"maximum({state}, {x})"] if nonneg else [f"{state} * {beta}"]
        return [f"{state} = {self.pick(*forms)}"]

    def step_of_matrices(self) -> list[str]:
        """Return a statement with functions of whole matrices."""
        low, _, left, basis, upper = (name in self.states for name in OF_WHOLE)
        g, of, back = ("wide(g)", "wide(u + 0 * g)", "unwide(g, {})") if self.wide else ("g", "(u + 0 * g)", "{}")
        forms = [
            lambda: f"u = newton_schulz({self.full('elem', 1, False)})",
            lambda: "u = gram(u + 0 * g) @ g / (1 + trace(gram(g)))", lambda: "u = top_rows(u + 0 * g, 0.5)",
            lambda: f"u = u + 0.1 * normal(g, {self.step()})",
            lambda: "u = unwide(g, gram(wide(g)) @ wide(u + 0 * g))",
            lambda: "u = finite(u + 0 * g)",
        ]  # fmt: skip
        if left:
            beta = self.decay()
            forms += [
                lambda: f"left = {beta} * left + (1 - {beta}) * gram({self.pick(g, of)})",
                lambda: "u = " + back.format(f"{self.pick('inverse_root(left, 4.0, 1e-6)', 'left')} @ {of}"),
            ]  # fmt: skip
        if basis:
            forms += [lambda: f"basis = qr({of} @ ({g}.T @ basis) + basis)"]
            forms += [lambda: "u = " + back.format(f"basis @ (basis.T @ {g})")]
        if low:
            beta, x = self.decay(), f"(basis.T @ {g})"
            averages = f"low = {beta} * low + (1 - {beta}) * {x}\nlow_sq = {beta} * low_sq + (1 - {beta}) * {x} * {x}"
            forms += [lambda: f"{averages}\nu = " + back.format("basis @ (low / (sqrt(low_sq) + 1e-8))")] * 8
        if upper:
            solved = "u = solve_triangular(u + 0 * g, upper + identity(upper))"
            forms += [lambda: "upper = 0.9 * upper + 0.1 * triangle(gram(g))", lambda: "u = upper @ (u + 0 * g)"]
            forms += [lambda: solved]
        return self.pick(*forms)().split("\n")


def _always(x: str) -> Callable[[], str]:
    return lambda: x


@st.composite
def rules(draw: Callable[..., Any]) -> tuple[str, bool]:
    """The text of a rule, and whether it takes matrices only."""
    w = Writer(draw)
    level = w.pick("elem", "elem", "tensor", "matrices", "flag", "whole")
    flags: dict[str, str] = {}
    when: dict[str, str] = {}
    if level != "elem":
        w.spaces |= {"tensor"} | ({"model"} if not w.count(3) else set())
    if level in ("flag", "whole"):
        flags["matrix"] = "shape_flag(lambda shape: len(shape) >= 2)"
    if level == "matrices":
        w.spaces |= set(OF_MATRICES)
    inside = {"matrix": w.spaces | set(OF_MATRICES)}
    for k in range(w.count(3) + (level == "elem")):
        space = w.pick(*["elem"] * 4, "host", *sorted(w.spaces & set(STATES) - {"elem"}))
        if level in ("flag", "whole") and not w.count(2):
            space, when[f"s{k}"] = w.pick("row", "col", "elem"), "matrix"
        elif not w.count(4) and space == "elem":
            when[f"s{k}"] = "on"
            flags["on"] = w.pick("flag(True)", "flag(False)", 'flag(nonzero="momentum")')
        nonneg = space != "host" and bool(w.count(1))
        base = next((n for n in w.nonneg["elem"] if n not in when), None)
        parts = ["nonneg"] if nonneg else []
        parts += [f'when="{when[f"s{k}"]}"'] if f"s{k}" in when else []
        if space == "elem" and not nonneg and base and f"s{k}" not in when and w.count(2):
            parts += [f'normalized_by="{base}"']
        elif not w.count(2):
            parts += ["init=" + w.pick("0.5", "1.0", '"lr"' if space == "elem" else "2.0")]
            if space == "elem" and not nonneg and not w.count(1):
                parts[-1] = 'init="param"'
        if space == "host":
            w.states[f"s{k}"] = f"scalar({w.pick('1.0', '0.0', '0.5')})"
        else:
            w.states[f"s{k}"] = f"{STATES[space]}({', '.join(parts)})"
        (w.nonneg if nonneg else w.names)[space].append(f"s{k}")
    if level == "whole":
        w.wide = not w.count(1)
        side, along = ("short", "long") if w.wide else ("rows", "columns")
        for name, text in (
            ("left", f'matrix_state("{side}", symmetric, when="matrix"{w.pick("", ", init=" + repr("identity"))})'),
            ("basis", f'low_rank_state("{side}", {w.pick("", "orthogonal, ")}rank="rank", when="matrix")'),
            ("upper", 'matrix_state("rows", triangular, when="matrix")'),
            ("low", f'low_rank_state("{along}", rank="rank", when="matrix", normalized_by="low_sq")'),
            ("low_sq", f'low_rank_state("{along}", nonneg, rank="rank", when="matrix")'),
        ):
            needs = {"low": "basis", "low_sq": "low"}.get(name)
            if (needs is None or needs in w.states) and (name == "low_sq" or w.count(1)):
                w.states[name], when[name] = text, "matrix"
                w.hypers |= {"rank": "hyper(4, ge=1, whole=True)"} if name == "basis" else {}
    _body(w, level, flags, when, inside)
    _prune(w)
    _rename(w, [*flags])
    signature = ["p", "g", *(["t"] if w.takes_step else []), *(f"{k}={v}" for k, v in w.states.items()), "*"]
    signature[-1:] = [*(f"{k}={v}" for k, v in w.inputs.items()), "*"]
    signature += [f"{k}={v}" for k, v in {**w.hypers, **flags}.items()]
    matrix = w.pick("", 'matrix="first"', 'matrix="heads"') if level != "elem" else ""
    lines = [f"@optimizer({matrix})", "def drawn(", *(f"    {part}," for part in signature), "):", *w.lines]
    lines += [f"    return {', '.join(['p', *w.states])}"]
    return "\n".join(lines), level == "matrices"


def _body(w: Writer, level: str, flags: dict[str, str], when: Mapping[str, str], inside: Mapping[str, Any]) -> None:
    """Write the statements of a rule, those of states under flags inside their blocks."""
    spaces = {s: (space, n) for n in (0, 1) for space, of in (w.names, w.nonneg)[n].items() for s in of}

    def hide(*names: str) -> None:
        for of in (w.names, w.nonneg):
            for space in of:
                of[space] = [n for n in of[space] if n not in names]

    def show(*names: str) -> None:
        for name in names:
            space, nonneg = spaces[name]
            (w.nonneg if nonneg else w.names)[space].append(name)

    if not w.count(3):
        w.inputs["x0"] = w.pick("input()", "input(nonneg)")
        spaces["x0"] = "elem", "nonneg" in w.inputs["x0"]
        show("x0")
    hide(*when)
    w.lines.append(f"    u = {w.full('elem', w.count(2), False)}")
    w.names["elem"].append("u")
    blocks: list[str] = [s for s in w.states if s not in when] + sorted(set(when.values())) + ["u"] * w.count(2)
    blocks += ["matrix"] * (level in ("flag", "whole") and "matrix" not in when.values()) + ["if"] * w.count(1)
    for what in draw_order(w, blocks):
        if what in w.states:
            w.lines += [f"    {line}" for line in w.update(what, *spaces[what])]
        elif what == "u":
            w.lines.append(f"    u = {w.pick('u + ', '0.5 * u + ', 'u * ', '')}{w.value('elem', 1 + w.count(2))}")
        else:
            name, kept = what, w.spaces
            own = [s for s, f in when.items() if f == what and s in spaces]
            if what == "if":
                name = w.pick("fresh", "often", "switch")
                texts = ("flag(first=True)", 'flag(every="k")', w.pick("flag(False)", "flag(True)"))
                flags[name] = texts[("fresh", "often", "switch").index(name)]
                w.spaces = w.spaces - {"model"}
            elif what == "matrix":
                w.spaces = inside["matrix"] - {"model"}
            show(*own)
            made = [line for s in own if s in w.states for line in w.update(s, *spaces[s])]
            if what == "matrix" and level == "whole":
                made += [line for _ in range(1 + w.count(1)) for line in w.step_of_matrices()]
            if not made or w.count(2):
                made += [f"u = {w.pick('u + ', 'u * ', '')}{w.value('elem', 1 + w.count(1))}"]
            made += [f"u = u + 0.1 * {s}" for s in own]
            hide(*own)
            w.spaces = kept
            w.lines += [f"    if {name}:", *(f"        {line}" for line in made)]
    if 'flag(nonzero="momentum")' in flags.values():
        w.hypers["momentum"] = w.pick("hyper(0.9, ge=0)", "hyper(0.0, ge=0)")
    if 'flag(every="k")' in flags.values():
        w.hypers["k"] = "hyper(2, ge=1, whole=True)"
    decay = w.pick("", "p * (1 - lr * weight_decay)", "p / (1 + lr * weight_decay)")
    if decay:
        w.hypers["weight_decay"] = "hyper(0.1, ge=0)"
        w.lines.append(f"    p = {decay}")
    w.lines.append(f"    p = p - lr * u{w.pick('', ' * ' + w.value('elem', 1))}")

def _prune(w: Writer) -> None:
    """Drop what was declared and is not used; a state that nothing else reads is a part of the step."""
    others = lambda s: [line for line in w.lines if not line.strip().startswith(f"{s} =")]  # noqa: E731
    for name in [s for s in OF_WHOLE if not _read(s, others(s))]:
        w.lines = [re.sub(rf"^( *){name} =.*", r"\1u = 0.5 * u", line) for line in w.lines]
        w.states.pop(name, None)
    last = next(k for k, line in enumerate(w.lines) if line.startswith("    p = "))
    w.lines[last:last] = [f"    u = u + 0.1 * {s}" for s in [*w.states, *w.inputs] if not _read(s, others(s))]
    for s in w.states:
        at = next((k for k, line in enumerate(w.lines) if line.strip().startswith(f"{s} =")), 0)
        if at and not _read(s, w.lines[: at + 1]):
            w.lines.insert(at, w.lines[at].partition(s)[0] + f"u = u + 0.1 * {s}")
    if not (_read("b1", w.lines) and _read("b2", w.lines)) and w.hypers.pop("betas", ""):
        w.hypers["beta"] = "hyper(0.9, ge=0, lt=1)"
        w.lines = [re.sub(r"\bb[12]\b", "beta", line) for line in w.lines]
    w.takes_step = _read("t", w.lines)
    used = ("betas", "rank" if "basis" in w.states else "", *("k momentum".split()))
    w.hypers = {k: v for k, v in w.hypers.items() if k in used or _read(k, w.lines)}
    if "betas" in w.hypers:
        w.lines.insert(0, "    b1, b2 = betas")


def _rename(w: Writer, flags: Sequence[str]) -> None:
    """Give locals, one of elements and one of the host, names that generated code may have for something else: some of
    its own, or one of the signature, whose value goes on under another."""
    signature = ["g", "t", *w.states, *w.inputs, *w.hypers, *flags]
    body = w.lines[:]
    if _read("lr", w.lines) and not w.count(2):
        w.takes_step = True
        w.lines = [re.sub(r"\blr\b", "rate", line) for line in w.lines]
        at = w.lines[:1] == ["    b1, b2 = betas"]
        w.lines.insert(at, "    rate = lr / (1 + t)")
        _give(w, "rate", signature, body)
    if w.count(1):
        _give(w, "u", signature, body)


def _give(w: Writer, local: str, signature: Sequence[str], body: Sequence[str]) -> None:
    """Give a local another name."""
    words = set(re.findall(r"\w+", "\n".join((*w.lines, *body))))
    name = w.pick("step", "step", *signature, *(x for x in OTHERS if x not in words))
    if name not in signature or name == "t" and not w.takes_step:
        w.lines = [re.sub(rf"\b{local}\b", name, line) for line in w.lines]
    elif f"{name}_old" not in words:
        at = w.lines[:1] == ["    b1, b2 = betas"]
        lines = [re.sub(rf"\b{name}\b", f"{name}_old", line) for line in w.lines[at:]]
        w.lines[at:] = [f"    {name}_old = {name}", *(re.sub(rf"\b{local}\b", name, line) for line in lines)]
        w.lines += [f"    {name} = {name}_old"] * (name in w.states)


OTHERS = (
    "b stored torch put larger quotient index table values host extent float self size tl math numel live k x "
    "scalar_0 scalar_1 one_minus_beta one_minus_lr common_1 grad_scale drawn_1 drawn_2 drawn_matrices p_tensor g_new "
    "p_kept out_p in_g noise draws t std optgen auto stage start lane origin block first count get"
).split()
"""Names that generated code has, or may have, for something else than a local of a rule."""


def _read(name: str, lines: list[str]) -> bool:
    return any(re.search(rf"\b{name}\b", line.partition(" = ")[2]) for line in lines)


def draw_order(w: Writer, blocks: list[str]) -> list[str]:
    return w.draw(st.permutations(blocks))


# -- plans


@st.composite
def plans(draw: Callable[..., Any]) -> str:
    """The text of a plan."""

    def pick(*of: Any) -> Any:
        return draw(st.sampled_from(of))

    block = pick(64, 32, 16, 128, 256)
    bits = lambda least=2: pick(*range(least, 9))  # noqa: E731
    rounding = lambda: pick("", ', rounding="nearest"', ', rounding="stochastic"')  # noqa: E731
    relative = lambda: pick("", ", relative=True")  # noqa: E731
    curve = lambda: pick("linear", "softsign(1)", "softsign(0.5)", "softsign(2)")  # noqa: E731
    scale = lambda *more: pick("scales.ue8m8", "scales.fp32", *more)  # noqa: E731
    of_roots = ("scales.ue7m9", "scales.fp16")
    table = lambda n: pick(f"codebooks.dynamic(bits={n})", "(-1.0, 0.0, 0.3, 1.0)")  # noqa: E731
    utable = lambda n: pick(f"codebooks.dynamic(signed=False, bits={n})", f"codebooks.linear_nozero({n})", "(0.01, 0.3, 1.0)")  # noqa: E731,E501

    def signed() -> str:
        n = bits()
        return pick(
            lambda: f"Blocked({bits()}, {block}, {curve()}, {scale('scales.fp16')}{relative()}{rounding()})",
            lambda: pick("floats.f32", "floats.bf16", "floats.f16", "floats.bf16_auto"),
            lambda: f"Codebook({table(n)}, {n}, {block}, {scale()}{pick('', ', ties=' + repr('down'))})",
            lambda: f"Fp8({pick('e4m3', 'e5m2')!r}, {block}, {scale()})",
        )()

    def nonneg() -> str:
        n = bits()
        few = bits(4)
        return pick(
            lambda: f"LogMinMax({few}, {block}{rounding()})",
            lambda: pick("floats.f32", "floats.bf16", "floats.bf16_auto"),
            lambda: f"Blocked({n}, {block}, {curve()}, {scale(*of_roots)}, signed=False{rounding()})",
            lambda: f"Codebook({utable(n)}, {n}, {block}, {scale()})",
            lambda: f"Fp8({pick('e4m3', 'e5m2')!r}, {block}, {scale()})",
            lambda: f"Rank1({n}, vectors={block})",
            lambda: f"Factored(vectors={pick('floats.f32', f'LogMinMax({few}, {block})')})",
        )()

    parts = [f"signed={signed()}", f"nonneg={nonneg()}"]
    splits = ("Split(8)", "Split(16)", "Split(8, 'nearest')")
    master = pick("", *splits, "Copy()", "Ecc8()", "Native('stochastic')")
    parts += [f"master={master}"] if master else []
    parts += ["matrices=8"] if pick(0, 1) else []
    parts += [f"initial={pick('floats.bf16', 'floats.bf16_auto')}"] if not pick(1, 1, 0) else []
    parts += [f"small_numel={pick(0, 0, 100)}", 'discouraged="drawn at random"']
    return "plan = Plan(\n" + "".join(f"    {part},\n" for part in ['"Drawn."', *parts]) + ")"


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Draw a program and its numbers."""
    rule, matrices = draw(rules())
    plan = draw(plans()) if draw(st.integers(0, 4)) else 'plan = Plan("fp32")'
    body = f"{rule}\n\n\n{plan}\n"
    used = set(re.findall(r"\w+", body))
    heads = [(m, sorted(used & set(m.__all__))) for m in (optgen.formats, optgen.lang)]
    text = "".join(f"from {m.__name__} import {', '.join(names)}\n" for m, names in heads) + "\n\n" + body
    among = MATRICES if matrices else VECTORS + MATRICES
    options: dict[str, Any] = {}
    for name, values in (
        ("switch", (True, False)), ("on", (True, False)), ("momentum", (0.0, 0.5)), ("lr", (1.0, 0.0)),
        ("beta", (0.0, 0.999)), ("eps", (1e-15, 1e-3)), ("weight_decay", (0.0,)), ("k", (1, 3)),
        ("rank", (2, 100)),
    ):  # fmt: skip
        if re.search(rf"^    {name}=(?!flag\(nonzero)", rule, re.M) and not draw(st.integers(0, 2)):
            options[name] = draw(st.sampled_from(values))
    return Case(
        text, tuple(draw(st.lists(st.sampled_from(among), min_size=1, max_size=3))), options,
        param=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        grad=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        scale=draw(st.one_of(st.integers(-6, 1), st.integers(-38, 38))), spread=draw(st.sampled_from([0, 1, 8, 30])),
        zeros=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])), special=not draw(st.integers(0, 9)) and draw(st.booleans()),
        steps=draw(st.integers(1, 3)), isa=draw(st.integers(0, len(ISAS) - 1)), seed=draw(st.integers(0, 999)),
    )  # fmt: skip


# -- the oracle: the same text on NumPy in fp64


def _over(f: Callable[..., Any], axes: tuple[int, ...] | None) -> Callable[[Any], Any]:
    def reduce(x: Any) -> Any:
        return f(x, axis=tuple(a for a in axes if -a <= np.ndim(x)), keepdims=True) if axes else f(x)

    return reduce


def _nothing(x: Any, *rest: Any, **more: Any) -> Any:
    return np.full_like(x, np.nan)


_SCOPES = {"row": (-1,), "col": (-2,), "mat": (-2, -1)}
NAMES: dict[str, Any] = {
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "square": np.square, "power": np.power,
    "exp": np.exp, "log": np.log, "sign": np.sign, "floor": np.floor, "rint": np.rint, "equal": np.equal,
    "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "atan2": np.arctan2, "where": np.where, "maximum": np.maximum, "minimum": np.minimum,
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    **{f"{scope}_{kind}": _over(f, axes) for scope, axes in _SCOPES.items()
       for kind, f in (("sum", np.sum), ("mean", np.mean), ("max", np.max))},
    "mat_norm": lambda x: np.sqrt(np.sum(x * x, axis=(-2, -1), keepdims=True)),
    "total": np.sum, "mean": np.mean, "amax": np.max, "norm": lambda x: np.sqrt(np.sum(x * x)),
    "rms": lambda x: np.sqrt(np.mean(x * x)), "dot": lambda a, b: np.sum(a * b), "model_total": np.sum,
    "model_norm": lambda x: np.sqrt(NAMES["model_total"](x * x)), "model_dot": lambda a, b: NAMES["model_total"](a * b),
    "triangle": np.triu, "identity": lambda x: np.broadcast_to(np.eye(x.shape[-1]), x.shape),
    "gram": lambda x: x @ np.swapaxes(x, -1, -2), "wide": lambda x: x if x.shape[-2] < x.shape[-1] else x.mT,
    "unwide": lambda like, x: np.full_like(like, np.nan),
    "trace": lambda x: np.trace(x, axis1=-2, axis2=-1)[..., None, None], "columns": lambda x: float(x.shape[-1]),
    **dict.fromkeys("newton_schulz top_rows finite inverse_root normal qr solve_triangular".split(), _nothing),
    "optimizer": lambda **_: lambda f: f, "symmetric": None, "orthogonal": None, "triangular": None, "nonneg": None,
    **dict.fromkeys((*STATES.values(), "matrix_state", "low_rank_state", "scalar"),
                    lambda *_, **kw: SimpleNamespace(kind="state", when=kw.get("when"))),
    "input": lambda *_: SimpleNamespace(kind="input"),
    "hyper": lambda x, **_: SimpleNamespace(kind="hyper", value=x),
    "flag": lambda x=False, **kw: SimpleNamespace(kind="flag", value=x, **kw),
    "shape_flag": lambda f: SimpleNamespace(kind="flag", shape=f),
}  # fmt: skip
"""What the names of the language mean; functions of whole matrices of which nothing is claimed are NaN."""


def _first(text: str, shape: tuple[int, ...]) -> bool:
    """Return True if matrices of a parameter are dimension 0 against all others; a stack of heads has several."""
    kind = re.search(r'matrix="(\w+)"', text)
    return bool(kind) and (kind[1] != "heads" or len(shape) != 3 or min(shape[1:]) < 8)


def oracle(case: Case, before: Mapping[str, Any], g: Any, t: int, host: Mapping[str, float]) -> dict[str, Any]:
    """The step number `t` in fp64 from decoded values: "p", the states, the host states."""
    rule = re.sub(r"^from .*\n|^plan = (?s:.*)", "", case.text, flags=re.M)
    made: dict[str, Any] = dict(NAMES)
    exec(compile(rule.replace(".T", ".mT"), "<oracle>", "exec"), made)
    arguments = inspect.signature(made["drawn"]).parameters
    shape = g.shape
    flat = (shape[0], math.prod(shape[1:])) if _first(rule, shape) and len(shape) > 2 else shape
    values: dict[str, Any] = {k: np.asarray(v, np.float64) for k, v in before.items()}

    values = {k: v.reshape(flat) if v.shape == shape else v for k, v in values.items()} | {"t": np.float64(t)}
    values |= {k: np.float64(v) for k, v in host.items()} | {"g": np.asarray(g, np.float64).reshape(flat)}
    for name, decl in ((k, p.default) for k, p in arguments.items() if k not in "pgt"):
        given = case.options.get(name, getattr(decl, "value", None))
        if decl.kind == "hyper":
            values[name] = tuple(map(np.float64, given)) if isinstance(given, tuple) else np.float64(given)
    for name, decl in ((k, p.default) for k, p in arguments.items() if k not in "pgt"):
        if decl.kind == "flag":
            values[name] = _on(name, vars(decl), values, case, shape, t)
    values |= {k: None for k, p in arguments.items() if k not in values}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = made["drawn"](**{k: values[k] for k in arguments})
    names = ["p", *(k for k, p in arguments.items() if getattr(p.default, "kind", "") == "state")]
    found = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    like = {k: values[k].shape for k in found if values[k] is not None}
    sized = {k: np.broadcast_to(np.asarray(found[k], np.float64), size) for k, size in like.items()}
    return {k: v.reshape(np.shape(before.get(k, v))) for k, v in sized.items()}


def _on(name: str, flag: Mapping[str, Any], values: Mapping[str, Any], case: Case, shape: Any, t: int) -> bool:
    """Return whether a flag holds at step t."""
    if "shape" in flag:
        return bool(flag["shape"](tuple(shape)))
    if "nonzero" in flag:
        return bool(values[flag["nonzero"]] != 0)
    if "every" in flag:
        return (t - bool(flag.get("first"))) % int(values[flag["every"]]) == 0
    return t == 1 if flag.get("first") else bool(case.options.get(name, flag["value"]))


def together(steps: Sequence[Any], way: str, count: float = math.inf) -> tuple[list[Any], int]:
    """Make a step of each parameter with sums over all of them, anew for each sum; return their number, too.

    way    the method of `Watched`
    count  number of sums of the rule: readings of its trace ask again, in an order of their own and of wider values;
           they get the hull of the sums whose operands overlap, whose own parts become as wide
    """
    known: list[Any] = []
    while True:
        parts: list[list[Any]] = [[] for _ in steps]

        def summed(own: list[Any], x: Any) -> Any:
            part, at = _sum(x), [len(own)]
            if len(own) < count:
                own.append((x, part))
            else:
                at = [j for j, (y, _) in enumerate(own) if not ((y.hi < x.lo) | (x.hi < y.lo)).any()]
                own[:] = [(y, _hull(had, part)) if j in at else (y, had) for j, (y, had) in enumerate(own)]
            assert at, "the rule has a sum over the model that the oracle has not"
            return reduce(_hull, [known[j] if j < len(known) else part * math.nan for j in at])

        made = []
        for step, own in zip(steps, parts, strict=True):
            one = partial(summed, own)
            with patch.dict(NAMES, model_total=one), patch.object(Interval.reader, "model_sum", one):
                made.append(getattr(step, way)())
        if len(known) == max(map(len, parts), default=0):
            return made, len(known)
        known.append(_sum([own[len(known)][1] for own in parts]))


def _sum(x: Any, plain: Any = Interval.reader.model_sum) -> Any:
    """Return the sum of all elements, or of a list of such sums."""
    if isinstance(x, list) and isinstance(x[0], Interval):
        x = x[0].spanning(*(torch.stack([getattr(y, end) for y in x]) for end in ("lo", "hi")))
    return plain(x) if isinstance(x, Interval) else np.sum(x)


def _hull(x: Interval, y: Interval) -> Interval:
    return x.spanning(torch.minimum(x.lo, y.lo), torch.maximum(x.hi, y.hi))


# -- a case


def load(text: str, folder: Path) -> Any:
    """Import a program's module, under a name of its text: what was compiled for it is found again."""
    return harness.module(Path(tempfile.mkdtemp(dir=folder)), f"program_{zlib.crc32(text.encode()):08x}", text)


def gradients(case: Case, draw: torch.Generator) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of all parameters for each step."""
    dtype = getattr(torch, case.grad)
    for _ in range(case.steps):
        made = []
        for shape in case.shapes:
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            x = x * 10.0 ** (case.scale - case.spread * torch.rand(shape, generator=draw, dtype=torch.float64))
            x = torch.where(torch.rand(shape, generator=draw) < case.zeros, 0.0, x)
            if case.special and x.numel() > 3:
                x.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            limit = torch.finfo(dtype).max
            made.append(torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype))
        yield made


def feed(opt: Any, case: Case, draw: torch.Generator) -> None:
    """Feed what a program takes beside gradients."""
    for name, trait in re.findall(r"^    (\w+)=input\((.*)\),$", case.text, re.M):
        made = [torch.randn(p.shape, generator=draw) for group in opt.param_groups for p in group["params"]]
        opt.feed(**{name: [x.abs() if trait else x for x in made]})


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Choose the instruction set of C++ kernels."""
    with patch.dict(os.environ, OPTGEN_ISA=ISAS[case.isa % len(ISAS)]), harness.unoptimized():
        yield


def trained(cls: Any, case: Case, plan: Any, backend: str) -> list[dict[str, Any]]:
    """Return what each parameter keeps after all steps on a backend.

    Where a gradient may make a NaN and a state has codes, that is the first step: the code of a NaN is any one, and
    what the next step reads of it any number.
    """
    draw = torch.Generator().manual_seed(case.seed)
    params = [torch.nn.Parameter(torch.randn(s, generator=draw).to(getattr(torch, case.param))) for s in case.shapes]
    for p in params:
        p.grad_dtype = None
    opt = cls(params, plan=plan.name, backend=backend, seed=case.seed, **case.options)
    for given in gradients(case, draw):
        for p, g in zip(params, given, strict=True):
            p.grad = g
        feed(opt, case, draw)
        opt.step()
        if case.special and any(is_coded(x) for p in params for x in opt.state[p].values()):
            break
    return [{"p": p.detach(), **opt.state[p]} for p in params]


def is_coded(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.dtype.is_floating_point


def differing(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], case: Case) -> list[str]:
    """Return what two backends keep differently; the codes of a parameter that has a NaN anywhere are not compared."""
    found = []
    for shape, a, b in zip(case.shapes, ours, theirs, strict=True):
        floats = [v for v in (*a.values(), *b.values()) if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
        lost = any(not v.isfinite().all() for v in floats)
        for name in a:
            if not (is_coded(a[name]) and lost) and not harness.same(a[name], b[name]):
                found.append(f"{name} of {shape}")
    return found


def inside(cls: Any, spec: Any, plan: Any, case: Case, backend: str, model: Any) -> None:
    """Step the first parameter, or all where sums are over all; assert that each step stays within its enclosure, and
    the oracle within the rule's."""
    draw = torch.Generator().manual_seed(case.seed)
    shapes = case.shapes if re.search(r"\bmodel_\w+\(", case.text) else case.shapes[:1]
    how: Any = {"plan": plan.name, "backend": backend, "seed": case.seed}
    trials = [Trial(cls, spec, torch.randn(shape, generator=draw), dtype=getattr(torch, case.param), model=model,
                    options=case.options, **how) for shape in shapes]  # fmt: skip
    opt = cls([trial.param for trial in trials], **how, **case.options)
    for trial in trials:
        opt.state[trial.param], trial.optimizer = trial.optimizer.state[trial.param], opt
    for gs in gradients(case, draw):
        feed(opt, case, draw)
        watched = [Watched(case, spec, plan, k, trial, gs[k]) for k, trial in enumerate(trials)]
        opt.step()
        watched = [one for one in watched if one.g.numel()]
        exact, count = together(watched, "exact")
        bounds, rules = (together(watched, way, count)[0] for way in ("bounds", "rule"))
        for one, *found in zip(watched, exact, bounds, rules, strict=True):
            one.check(f"{backend} in {'fast' if model is FAST else 'strict'} maths", *found)


class Watched:
    """A step of the parameter number `k`, made between construction and the methods' calls."""

    def __init__(self, case: Case, spec: Any, plan: Any, k: int, trial: Trial, g: torch.Tensor) -> None:
        self.case, self.spec, self.trial, self.g, self.step = case, spec, trial, g, trial.step
        self.kept, self.host = trial.decoded(), trial.host
        self.storage = trial.storage(plan, targets.recurrences_of(spec, tuple(sorted(trial.flags.items()))))
        # A code times a number, its curve in three operations, the scale; the square doubles these, and is another.
        curved = dict.fromkeys(self.storage.states, 11)
        self.start = Values.decoded(self.kept, self.host, self.step, trial.model, curved)
        trial.param.grad = g.clone()

    def after(self) -> dict[str, torch.Tensor]:  # inputs are freed by now
        return self.trial.decoded() | {s.name: self.kept[s.name] for s in self.spec.states if s.trait == INPUT}

    def exact(self) -> dict[str, Any]:
        kept = {k: v.numpy() for k, v in self.kept.items()}
        return oracle(self.case, kept, self.g.double().numpy(), self.step + 1, self.host)

    def bounds(self) -> Values:
        return enclose(self.spec, self.storage, self.start, self.g, self.trial.hypers, kept=self.after())

    def rule(self) -> dict[str, Interval]:
        return reading(self.spec, self.start, self.g, self.trial.hypers)

    def check(self, where: str, found: Mapping[str, Any], bounds: Values, rule: Mapping[str, Interval]) -> None:
        hypers, shape = self.trial.hypers, tuple(self.g.shape)
        trace = self.spec.trace(self.spec.flag_values({**hypers, **self.host}, shape, self.step + 1))
        waiting = self.spec.waiting(trace)
        for name, got in self.trial.host.items():
            one = float(found.get(name, self.host[name] * (name in waiting)))  # an input stays fed until it is read
            assert abs(got - one) <= 1e-12 * abs(one) or got == one, f"host state {name} is {got}, not {one}"
        after = self.after()
        exact = {k: torch.from_numpy(np.array(found[k])) if k in found else after[k].double() for k in after}
        report = compare(after, bounds, exact, rule)
        what = f"{where}, step {self.step + 1}, {tuple(self.g.shape)}"
        assert report.ok, f"{what}: {[report.worst[name] for name in report.broken]}"


class Refused(Exception):
    """A program that optgen refuses, with a place; the text has the code of the error."""


class Unplaced(AssertionError):
    """A program that optgen refuses without a place."""


def run(case: Case, folder: Path) -> None:
    """Build a program and run it; AssertionError where something is not as documented, Refused where it may not be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = load(case.text, folder)
            cls = compiled(module.drawn, module.plan, "strict")
        except UserError as error:
            raise Refused(f"{error.code} {error.message}") if error.locs else Unplaced(str(error)) from error
        spec, plan = module.drawn, module.plan
        with _settings(case):
            try:
                reference = trained(cls, case, plan, "reference")
            except RuntimeError as error:  # a flag gives the operands of a sum, and so the sum, another name
                if "needs the sums over the model" not in str(error):
                    raise
                raise Refused(str(error)) from error
            for backend in ("triton", "cpp"):
                if backend in case.kernels:
                    found = differing(trained(cls, case, plan, backend), reference, case)
                    assert not found, f"{backend} differs from the reference in {found}"
            inside(cls, spec, plan, case, "reference", STRICT)
            if "fast" in case.kernels:
                fast = compiled(spec, plan, "fast")
                for backend in ("cpp", "triton"):
                    inside(fast, spec, plan, case, backend, FAST)
