"""Functions of elements (exp, log, tanh ...): certified errors, one set of bits, specials, enclosures."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs.tools import certify_functions as certificates
from optgen.lang import atan2, exp, hyper, log, optimizer, sigmoid, state, tanh
from optgen.runtime.cpu import native
from optgen.verify.intervals import FAST, STRICT, Interval, Rounding
from tests import harness
from tests.test_specials import NANS

ULPS = {"exp": 0.99, "log": 0.85, "tanh": 1.34, "sigmoid": 2.41, "atan2": 1.58, "exp2": 1.09}
"""The errors that docs/language.md states."""
RISING = ("exp", "log", "tanh")


@pytest.mark.parametrize("name", ULPS)
def test_errors_are_those_of_the_certificate(name: str) -> None:
    """One argument in some thousands, and all specials; the largest against mpmath, which knows better than fp64."""
    made = certificates.certify(name, 12289, 65537)
    assert made.wrong == 0 and made.falls == 0
    assert made.largest <= ULPS[name] and made.count > 5e4
    assert 0.5 < made.by_mpmath(100) <= ULPS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ULPS)
def test_errors_at_every_argument(name: str) -> None:
    made = certificates.certify(name)
    assert made.wrong == 0 and (made.falls == 0 or name not in RISING)
    assert made.largest <= ULPS[name] and made.by_mpmath() <= ULPS[name]


EXACT = {
    "exp": [(0.0, 1.0), (-0.0, 1.0), (88.73, math.inf), (-103.9, 2.0**-149), (-104.0, 0.0)],
    "log": [(1.0, 0.0), (0.0, -math.inf), (-1.0, math.nan), (math.inf, math.inf)],
    "tanh": [(0.0, 0.0), (-0.0, -0.0), (2.0**-149, 2.0**-149), (-30.0, -1.0), (math.inf, 1.0)],
    "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (-103.9, 2.0**-149), (30.0, 1.0)],
    "exp2": [(0.0, 1.0), (3.0, 8.0), (-149.0, 2.0**-149), (-151.0, 0.0), (127.0, 2.0**127), (128.0, math.inf)],
}


@pytest.mark.parametrize("name", EXACT)  # the certificate of atan2 has all pairs of specials
def test_specials(name: str) -> None:
    """Zeros, infinities, NaN, and numbers about which a result becomes constant, infinite or subnormal."""
    edges = torch.tensor([88.72, 88.73, -103.9, -104.0, -30.0, 30.0, 4.0, -149.0, -151.0, 127.0, 128.0])
    made = certificates.Certificate(name)
    made.see(torch.cat([certificates.SPECIALS, edges, NANS]))
    assert made.wrong == 0 and made.largest <= ULPS[name]
    x, wanted = torch.tensor(EXACT[name]).unbind(1)
    got = certificates.OURS[name](x)
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(got.signbit(), wanted.signbit()) or name == "log"


@optimizer(cite="a test")
def functions(
    p, g, raised=state(), logged=state(), squashed=state(), gated=state(), turned=state(),
    halved=state(), doubled=state(), *, lr=hyper(1.0), base=hyper(0.7, gt=0),
):  # fmt: skip
    raised = 0.0 * raised + exp(g)
    logged = 0.0 * logged + log(abs(g) + 1e-30)
    squashed = 0.0 * squashed + tanh(g)
    gated = 0.0 * gated + sigmoid(g)
    turned = 0.0 * turned + atan2(g, p)
    halved = 0.0 * halved + base**g
    doubled = 0.0 * doubled + 2**g
    p = p - lr * tanh(p)
    return p, raised, logged, squashed, gated, turned, halved, doubled


def given() -> tuple[Tensor, Tensor]:
    """A weight and a gradient: of most sizes, then infinities, zeros and numbers near both ends of fp32."""
    torch.manual_seed(0)
    g, p = torch.randn(2, 1500) * 10.0 ** (torch.rand(2, 1500) * 5 - 3)
    ends = certificates.SPECIALS
    return torch.cat([p, ends.repeat(len(ends))]), torch.cat([g, ends.repeat_interleave(len(ends))])


@pytest.mark.parametrize("maths", ["strict", "fast"])
def test_backends_have_the_bits_of_the_definitions_and_fast_maths_is_near(maths: str, tmp_path: Path) -> None:
    """Strict kernels and the reference on one side, the definitions on torch tensors on the other; fast maths within
    enclosures, where it may take 0 for subnormal numbers."""
    case = harness.case_of(functions, harness.plan_of("fp32"), "float32")
    pair, (p, g) = harness.Pair(functions, case, tmp_path, maths), given()
    made = {name: pair.buffers((len(g),), p) for name in ("reference", "triton", "cpp")}
    pair.run_reference(made["reference"], g, 1, 1, 1)
    pair.run_triton(made["triton"], g, 1, 1, 1)
    if native.compiler() is not None:
        pair.run_cpp([(made["cpp"], g, 1)], 1, 1)
    else:
        del made["cpp"]
    ours, base = certificates.OURS, torch.tensor(0.7, dtype=torch.float64)
    wanted = {
        "raised": ours["exp"](g), "logged": ours["log"](g.abs() + 1e-30), "squashed": ours["tanh"](g),
        "gated": ours["sigmoid"](g), "turned": ours["atan2"](g, p),
        "halved": ours["pow"](float(base), g), "doubled": ours["exp2"](g), "p": p - ours["tanh"](p),
    }  # fmt: skip
    inside = functions.evaluate(*(Interval.point(x, FAST) for x in (p, g)), 1)
    for backend, kept in made.items():
        for name, exact in wanted.items():
            assert torch.equal(kept[name].isnan(), exact.isnan()), (backend, name)
            if maths == "strict" or backend == "reference":
                assert torch.equal(kept[name].nan_to_num(7.0), (exact + 0.0).nan_to_num(7.0)), (backend, name)
            else:
                found = inside[0] if name == "p" else inside[1][name]
                assert found.contains(kept[name]).all(), (backend, name)
                assert found.known.sum() > 1500


@pytest.mark.parametrize("model", [STRICT, FAST], ids=["strict", "fast"])
def test_enclosures_hold_what_fp32_and_fp64_have(model: Rounding) -> None:
    """Enclosures of points and of intervals; those of points are narrow."""
    p, g = given()
    x, y = (a[a.isfinite() & p.isfinite() & g.isfinite()] for a in (p, g))
    for name, ours in certificates.OURS.items():
        for radius in (0.0, 0.1):
            boxes = [Interval.point(a, model).widened(radius * a.double().abs()) for a in (y, x)]
            operands, numbers = (boxes, (y, x)) if name == "atan2" else (boxes[:1], (y,))
            if name == "exp2":
                found, exact = 2.0 ** boxes[0], torch.exp2(y.double())
            elif name == "pow":
                found, exact, numbers = 0.3 ** boxes[0], 0.3 ** y.double(), (0.3, y)
            else:
                found = getattr(Interval.reader, name)(*operands)
                exact = certificates.EXACT[name](*(a.double() for a in numbers))
            assert found.contains(exact).all(), (name, radius)
            assert found.contains(ours(*numbers)).all(), (name, radius)
            if radius == 0.0 and name not in ("atan2", "exp2", "pow", "log"):
                wide = (found.hi - found.lo) > 2 * 14 * model.unit * exact.abs()
                assert not (wide & (exact.abs() > 2.0**-100) & (exact < 3e38)).any(), name
