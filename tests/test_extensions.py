"""Formats, backends and primitives in one file of a stranger's, without a change to the package."""

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch

from optgen.backends import cpp, triton
from optgen.base.errors import UserError
from optgen.driver import emit
from optgen.driver.build import Request, build
from optgen.driver.compile import compile
from optgen.driver.memory import UNKNOWN, memory
from optgen.formats import Plan
from optgen.ir import node as ir
from optgen.ir.ranges import Intervals
from optgen.lang import hyper, optimizer, state
from optgen.lang.plain import plain_formulas
from optgen.lang.symbolic import expression
from optgen.ops import dtypes, prims, spaces
from optgen.optim import AdamW
from optgen.runtime.cpu import native
from optgen.verify import bounds, lint
from optgen.verify.differential import stored
from optgen.verify.intervals import Interval
from specs.adamw import adamw
from tests.harness import module

FORMAT = '''
from dataclasses import dataclass

from optgen.formats import Field, Format
from optgen.formats.bound import Bound
from optgen.lang.values import bits, cast, from_bits
from optgen.ops.dtypes import i16, i32


@dataclass(frozen=True)
class Cut(Format):
    """bf16 by cutting the low half off, as the earliest ones were."""

    def fields(self):
        return {"": Field(i16)}

    def encode(self, x, *, noise=None, root=None):
        return {"": cast(bits(x) >> 16, i16)}

    def decode(self, parts, *, root=None):
        return from_bits(cast(parts[""], i32) << 16)


@dataclass(frozen=True)
class Bounded(Cut):
    """The same, and what it is off by."""

    def bound(self):
        return Bound(2.0**-7, "value", "2^-126 <= |x|", absolute=2.0**-133)


class Pairs(Cut):
    """The same, with a number that two elements share."""

    def fields(self):
        return {"": Field(i16), "shared": Field(i16, 2)}
'''


def test_a_format_in_one_file_states_its_bound_or_has_none(tmp_path: Path) -> None:
    mine = module(tmp_path, "cut", FORMAT)
    for fmt, error in ((mine.Cut(), UNKNOWN), (mine.Bounded(), "0.00781 |x|")):
        plan = Plan("Cut moments.", name="cut", signed=fmt, nonneg=fmt)
        storage = plan.storage(adamw.present({"amsgrad": False}), dtypes.f32, False)
        row = next(row for row in memory(adamw, storage) if row.name == "exp_avg")
        assert (row.error, row.bytes) == (error, 2.0)
        # What is not stated is measured.
        findings = lint.lint({"exp_avg_sq": lint.Recurrence("ema", 0.999)}, storage)
        assert [f.code for f in findings if f.severity == "error"] == ["L2"]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator) * torch.logspace(-44, 38, 64)
    x[1] = 0.0
    kept = mine.Cut().decode(mine.Cut().encode(x)).double()
    point = Interval.point(x)
    assert not stored(mine.Cut(), point).known.any()
    found = stored(mine.Bounded(), point)
    assert found.known.all() and found.contains(kept).all()
    assert (found.hi - found.lo <= 2.0**-5 * x.double().abs() + 2.0**-132).all()


def test_what_a_format_states_does_not_hold_of_one_that_encodes_otherwise(tmp_path: Path) -> None:
    mine = module(tmp_path, "cut", FORMAT)

    class Other(mine.Bounded):  # type: ignore[misc, name-defined]
        def decode(self, parts: object, *, root: object = None) -> object:
            return super().decode(parts) * 2.0

    assert mine.Bounded().bound() is not None
    with pytest.raises(bounds.UnknownBound, match="Other states none"):
        bounds.one_step_bound(Other())


def test_blocks_that_no_kernel_has_are_refused(tmp_path: Path) -> None:
    plan = Plan("Pairs.", name="pairs", signed=module(tmp_path, "cut", FORMAT).Pairs())
    with pytest.raises(UserError, match=r"`exp_avg` in blocks of 2, by Pairs, .*: use blocks .*, 16 to 2048"):
        plan.storage(adamw.states, dtypes.f32, False)


FIXED = """
from dataclasses import dataclass

from optgen.formats import Field, Format
from optgen.lang import clip, rint
from optgen.lang.values import cast
from optgen.ops.dtypes import DType, f32, i8


@dataclass(frozen=True)
class Fixed(Format):
    kept: DType = i8

    def fields(self):
        return {"": Field(self.kept)}

    def encode(self, x, *, noise=None, root=None):
        return {"": cast(clip(rint(x * 1024.0), -127.0, 127.0), self.kept)}

    def decode(self, parts, *, root=None):
        return cast(parts[""], f32) * (1 / 1024)
"""


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kept", ["i8", "i16", "i32"])
def test_integers_of_any_width_are_cast_from_and_to_floats(kept: str, tmp_path: Path) -> None:
    fmt = module(tmp_path, "fixed", FIXED).Fixed(getattr(dtypes, kept))
    plan = Plan("Fixed point.", name=f"fixed_{kept}", signed=fmt, discouraged="a test", small_numel=0)
    made = []
    for backend in ("reference", "cpp", *(["triton"] if find_spec("triton") else [])):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 300))
        opt = compile(adamw, plan, "strict")([p], plan=plan.name, backend=backend)
        for k in range(3):
            p.grad = torch.linspace(-1, 1, 300) ** 3 * (k + 1)
            opt.step()
        made.append((p.detach(), opt.state[p]["exp_avg_codes"]))
    codes = made[0][1].double()
    assert codes.abs().max() == 127 and codes.unique().numel() > 100
    assert all(torch.equal(p, made[0][0]) and torch.equal(m, made[0][1]) for p, m in made[1:])


BACKEND = """
import numpy as np

from optgen.backends.printer import ATOM, Printer, number
from optgen.driver import emit, kernel_text

SPELL = {
    "const": lambda p, n: (f"np.float32({number(n)})", ATOM),
    "sym": lambda p, n: (n.attr, ATOM),
    "load": lambda p, n: (n.attr, ATOM),
    "sqrt": lambda p, n: p.call("np.sqrt", *n.args),
    "max": lambda p, n: p.call("np.maximum", *n.args),
}


def text(spec, maths):
    functions = {}
    for setting in kernel_text.rule_kernels(spec, "strict").settings:
        step = setting.step
        (only,) = step.stages
        program, sweep, printer = only.schedule.program, only.schedule.sweep, Printer(SPELL, {})
        arguments = [b.name for b in program.buffers] + [let.name for let in step.host]
        (name,) = setting.kernels
        functions[name] = [f"def {name}({', '.join(arguments)}):"]
        functions[name] += [f"    {let.name} = {printer.bind(let)}" for let in sweep.lets]
        results = ", ".join(f"{s.buffer}={printer.text(s.node)}" for s in sweep.stores)
        functions[name] += [f"    return dict({results})"]
    return {"numpy_text.py": "\\n".join(["import numpy as np", *(x for f in functions.values() for x in ("", *f)), ""])}


emit.BACKENDS["numpy"] = emit.Backend(text)
"""


def test_a_backend_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy text of AdamW has the bits of the eager reference."""
    monkeypatch.setitem(emit.BACKENDS, "numpy", emit.BACKENDS["reference"])  # it is gone after the test
    monkeypatch.chdir(tmp_path)
    module(tmp_path, "numpy_backend", BACKEND)
    build(Request(names=("adamw",), plans=("fp32",), out="made"))
    texts = {file.name: file.read_text() for file in (tmp_path / "made/adamw").glob("*.*")}
    rule, records = (module(tmp_path, name, texts[f"{name}.py"]) for name in ("numpy_text", "__init__"))

    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(70, 90, generator=generator))
    mine = {"p": p.detach().numpy().copy(), **{x: np.zeros(p.shape, "float32") for x in ("exp_avg", "exp_avg_sq")}}
    optimizer_made = AdamW([p], plan="fp32", backend="reference", **options)
    for step in range(1, 4):
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer_made.step()
        scalars = map(np.float32, records.host_scalars(step, 1.0, **options))
        mine = rule.adamw(mine["p"], p.grad.numpy(), mine["exp_avg"], mine["exp_avg_sq"], *scalars)
    kept = {"p": p.detach(), **optimizer_made.state[p]}
    assert all(np.array_equal(mine[x], kept[x].numpy()) for x in mine)


PRIMITIVES = """
import math

from optgen.backends import cpp, triton
from optgen.base.errors import UserError
from optgen.driver import emit
from optgen.driver.build import Request, build
from optgen.backends.printer import ATOM
from optgen.lang.values import exp2, primitive
from optgen.ops.prims import Prim

# Core: a spelling for each backend.
relu = primitive(Prim("relu", "f", "max(x, 0)", number=lambda x: max(x, 0.0), tensor="relu", rises="+"))
triton.STRICT["relu"] = triton.FAST["relu"] = lambda p, n: (f"tl.maximum({p.text(n.args[0])}, 0.0)", ATOM)
cpp.SPELL["relu"] = lambda p, n: (f"max({p.text(n.args[0])}, F(0.0f))", ATOM)

# Not core: a definition, and nothing else.
halve = primitive(
    Prim("halve", "f", "2 ** -x", core=False, rises="-", number=lambda x: 2.0**-x, symbol=lambda m, x: m.Pow(2, -x)),
    lambda x: exp2(-x),
)
"""


def test_primitives_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (prims.PRIMS, triton.STRICT, triton.FAST, cpp.SPELL):
        for name in ("relu", "halve"):  # both are gone after the test
            monkeypatch.setitem(table, name, None)
    mine = module(tmp_path, "mine", PRIMITIVES)

    @optimizer()
    def gated(p, g, m=state(), *, lr=hyper(1e-2, ge=0)):
        m = 0.9 * m + mine.relu(g) * mine.halve(abs(m))
        p = p - lr * m
        return p, m

    gated.check()
    assert expression(gated.trace().states["m"], {}).has(sympy.Function("relu"))
    assert "relu(g)" in plain_formulas(gated)[0]

    generator = torch.Generator().manual_seed(1)
    p, g, m = (torch.randn(16, 64, generator=generator, dtype=torch.float64).float().double() for _ in range(3))
    _, exact, _ = gated.evaluate(p, g, 1, {"m": m})
    assert torch.equal(exact["m"], 0.9 * m + g.clamp(min=0) * torch.exp2(-m.abs()))
    _, inside, _ = gated.evaluate(*(Interval.point(x) for x in (p, g)), 1, {"m": Interval.point(m)})
    assert inside["m"].known.all() and inside["m"].contains(exact["m"]).all()

    x = ir.load("x", dtypes.f32, spaces.elem)
    assert Intervals({})(ir.op("relu", x)) == (0.0, math.inf)

    made = compile(gated, "fp32", maths="strict")
    folder = Path(sys.modules[made.__module__].__file__ or "").parent
    text = "".join(file.read_text() for file in folder.rglob("*.*") if file.suffix in (".py", ".h"))
    for spelled in ("tl.maximum(g, 0.0)", "max(g_, F(0.0f))"):
        assert spelled in text
    assert "halve" not in text.replace("mine.halve", "")  # but in the comment
    weight = torch.nn.Parameter(p.float())
    optimizer_made = made([weight], plan="fp32", backend="reference")
    weight.grad = g.float()
    optimizer_made.step()
    _, new, _ = gated.evaluate(p, g, 1)
    torch.testing.assert_close(optimizer_made.state[weight]["m"].double(), new["m"], rtol=1e-6, atol=0)
