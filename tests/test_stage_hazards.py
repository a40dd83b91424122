"""Rules whose stages could get into each other's way: states handed on, sums that differ, groups that disagree.

Each rule is run by the eager reference and in C++, and held to the author's own function in fp64.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import optgen
from optgen.base.errors import UserError
from tests import harness

from optgen.lang import (  # isort: skip
    hyper, model_dot, model_norm, model_total, optimizer, shape_flag, sqrt, state,
)  # fmt: skip
from optgen.lang.spec import Spec

BACKENDS = ("reference", "cpp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_differs_between_groups_stays_inside_a_sum_over_the_model(backend: str) -> None:
    """`maximize` turns one group's gradients round before they are summed with the other's."""
    cls = optgen.compile("prodigy", plan="fp32")
    draw = torch.Generator().manual_seed(5)
    start = [torch.randn(20, 30, generator=draw), torch.randn(50, generator=draw)]
    steps = [[torch.randn(w.shape, generator=draw) for w in start] for _ in range(6)]

    def walk(turned: bool) -> tuple[list[torch.Tensor], set[float]]:
        a, b = (torch.nn.Parameter(w.clone()) for w in start)
        opt = cls([{"params": [a]}, {"params": [b], "maximize": turned}], plan="fp32", backend=backend, d0=1e-3)
        for first, second in steps:
            a.grad, b.grad = first.clone(), (-second if turned else second).clone()
            opt.step()
        return [a.detach(), b.detach()], {float(s["d"]) for s in opt.state.values()}

    (plain, d), (turned, e) = walk(False), walk(True)
    assert len(d) == len(e) == 1
    assert d == e
    assert all(torch.equal(x, y) for x, y in zip(plain, turned, strict=True))


@optimizer()
def wide_or_not(p, g, m=state(), *, lr=hyper(1e-2, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    m = 0.9 * m + g
    if wide:
        p = p - lr * m / (model_total(abs(m)) + 1e-8)
        p = p - lr * g / (model_norm(g) + 1e-8)
    else:
        p = p - lr * g / (model_norm(g) + 1e-8)
        p = p - lr * m / (sqrt(model_norm(g * m)) + model_total(abs(m)) + 1e-8)
    return p, m


@optimizer()
def sum_for_vectors(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    if not wide:
        g = g / (model_norm(g) + 1e-8)
    p = p - lr * g
    return p


@pytest.mark.parametrize(
    ("spec", "backend", "said"),
    [
        *((wide_or_not, backend, "all groups need the same") for backend in BACKENDS),
        (sum_for_vectors, "reference", r"but parameter 0.* needs none: .*take it outside of `if` in the rule"),
    ],
)
def test_parameters_that_need_other_sums_are_refused_before_anything_changes(
    spec: Spec, backend: str, said: str
) -> None:
    params = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    opt = optgen.compile(spec, plan="fp32")(params, plan="fp32", backend=backend)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=said):
        opt.step()
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in params)


def scaled(g: Any, size: Any, wide: bool) -> Any:
    """A sum of its own that only vectors use."""
    largest = model_total(abs(g))
    return g if wide else g * size / (size + largest)


@optimizer()
def sums_of_all(p, g, m=state(), *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    """Two sums in another order of use, a third that depends on one of them, and one of a helper."""
    m = 0.5 * m + g
    one = model_norm(g) + 1e-8
    two = model_total(abs(m)) + 1e-8
    three = model_dot(m, g / one)
    by = two / one if wide else one / (1 + three) / two
    p = p - lr * by * scaled(g, one, wide)
    return p, m


@optimizer()
def sums_that_vectors_have_once(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
    """Two sums that are equal for vectors by chance, two sums of these, and one that is another's everywhere."""
    v = 3 * g if wide else g
    one = model_total(v)
    two = model_total(g)
    three = model_total(p * one)
    four = model_total(p * two)
    five = model_total(g)
    p = p - lr * g * (one - 2 * two + three - 3 * four + five)
    return p


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_sums_over_the_model_are_taken_in_one_order(backend: str) -> None:
    """The weights are whole numbers, of which no sum rounds."""
    params = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    for p in params:
        p.grad = 2 * torch.ones_like(p)
    optgen.compile(sums_that_vectors_have_once, plan="fp32")(params, plan="fp32", backend=backend).step()
    assert all((p == 1 - 2 * (44 - 40 + 10 * (44 - 60) + 20)).all() for p in params)


def test_sums_over_the_model_that_are_always_equal_are_one() -> None:
    for wide in (True, False):
        assert len({node for node, *_ in sums_that_vectors_have_once.trace({"wide": wide}).sums}) == 4


def test_a_sum_over_the_model_in_both_branches_of_a_shape_is_refused() -> None:
    @optimizer()
    def of_branches(p, g, *, lr=hyper(1.0, ge=0), wide=shape_flag(lambda shape: len(shape) >= 2)):
        size = model_norm(g) if wide else model_norm(2 * g)
        p = p - lr * g / (size + 1)
        return p

    with pytest.raises(UserError, match=r"parameters of other shapes take a sum at .*, and all are added up"):
        of_branches.check()


@pytest.mark.parametrize("maths", ["strict", "fast"])
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_sum_over_the_model_is_over_parameters_that_do_not_use_it(backend: str, maths: str) -> None:
    """The sums in numpy, fp64, over all parameters."""
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((20, 6), (3,), (2, 2, 3), (70,))]
    opt = optgen.compile(sums_of_all, plan="fp32", maths=maths)(params, plan="fp32", backend=backend, lr=0.25)
    draw = np.random.default_rng(3)
    moment = [np.zeros(p.shape) for p in params]
    weight = [np.ones(p.shape) for p in params]
    for _ in range(2):
        grads = [draw.standard_normal(p.shape).astype(np.float32).astype(np.float64) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g, dtype=torch.float32)
        opt.step()
        moment = [0.5 * m + g for m, g in zip(moment, grads, strict=True)]
        one = np.sqrt(sum((g * g).sum() for g in grads))
        two = sum(abs(m).sum() for m in moment)
        three = sum((m * g / one).sum() for m, g in zip(moment, grads, strict=True))
        largest = sum(abs(g).sum() for g in grads)
        for k, g in enumerate(grads):
            step = two / one * g if g.ndim >= 2 else one / (1 + three) / two * g * one / (one + largest)
            weight[k] = weight[k] - 0.25 * step
    for p, w in zip(params, weight, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-5, atol=1e-5)


def test_no_sum_is_left_to_atomics() -> None:
    """Their order would be that in which threads come by; every partial sum is one program's."""
    root = Path(__file__).parents[1]
    folders = root / "optgen" / "runtime" / "gpu", root / "optgen" / "runtime" / "cpu"
    files = [file for folder in folders for ending in ("*.py", "*.h") for file in folder.rglob(ending)]
    files += [file for ending in ("*.py", "*.h") for file in harness.texts("atomics", ending)]
    assert {"kernels.h", "triton.py", "stages.h", "prelude.py"} <= {file.name for file in files}
    assert [file for file in files if "atomic" in file.read_text().lower()] == []
