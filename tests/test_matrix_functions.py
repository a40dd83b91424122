"""Functions of whole matrices beside torch.linalg in fp64, on tensors and in rules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.backends.matrices import matrix_function, needs
from optgen.driver.steps import rule_step
from optgen.lang import (
    bjorck,
    flag,
    gram,
    hyper,
    identity,
    inverse_root,
    low_rank_state,
    matrix_state,
    norm_lower_bound,
    optimizer,
    shape_flag,
    singular_vectors,
    unwide,
    wide,
)  # fmt: skip
from optgen.runtime.reference import matrices
from tests.test_matrices import drawn

U = 2.0**-24
SHAPES = [(3, 40, 12), (12, 40), (2, 2, 16, 16), (5, 1), (1, 1, 7)]


def spectrum(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """A matrix in fp64 of these singular values and random singular vectors."""
    u, _, v = torch.linalg.svd(drawn(*shape).double(), full_matrices=False)
    return u * values @ v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bjorck_brings_singular_values_to_1(shape: tuple[int, ...]) -> None:
    """0.2 goes to at most 1.5 d^2 + .5 d^3 = 0.064, 0.0063, 6e-5, 6e-9."""
    k = min(shape[-2:])
    values = begin = torch.linspace(0.8, 1.2, k, dtype=torch.float64)
    for steps in range(6):
        made, wanted = bjorck(spectrum(shape, begin).float(), steps), spectrum(shape, values)
        assert (made - wanted).norm() <= 8 * (steps + 1) * k * U * wanted.norm()
        values = 1.5 * values - 0.5 * values**3
    assert (torch.linalg.svdvals(made.double()) - 1).abs().max() <= 8 * k * U


@pytest.mark.parametrize("shape", [(3, 40, 24), (24, 40), (2, 2, 30, 30)], ids=str)
def test_singular_vectors_are_the_first(shape: tuple[int, ...]) -> None:
    """In fp32, the fourth from the fifth by a gap of 3 / 4^4 of the norm."""
    x = spectrum(shape, 4.0 ** -torch.arange(min(shape[-2:]), dtype=torch.float64))
    u = torch.linalg.svd(x).U[..., :4]
    found = singular_vectors(torch.zeros(*shape[:-1], 4), x.float())
    assert (found.double() - u @ (u.mT @ found.double())).norm(dim=(-2, -1)).max() <= 4**4 * 24 * U
    assert (found.abs().amax(-2) == found.amax(-2)).all()


@optimizer(cite="nobody", matrix="heads")
def by_all(
    p, g, t,
    left=matrix_state("rows", when="is_matrix"), basis=low_rank_state("short", rank="rank", when="is_matrix"),
    *,
    lr=hyper(0.1, ge=0), rank=hyper(2, ge=1, whole=True), order=hyper(2, ge=1, whole=True), starts=flag(first=True),
    is_matrix=shape_flag(lambda shape: len(shape) >= 2),
):  # fmt: skip
    """All of these functions in one rule."""
    if not is_matrix:
        p = p - lr * g
        return p, left, basis
    left = 0.9 * left + gram(g)
    full = wide(g)
    basis = singular_vectors(basis, full) if starts else basis
    p = p - lr * inverse_root(left + identity(left), order, 1e-3) @ bjorck(g / 10, order)
    p = p - lr * unwide(g, basis @ (basis.T @ full))
    return p, left, basis


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_rules_call_them(backend: str) -> None:
    """Each backend's step in fp32 against the rule's fp64 reading: relative to the largest value, within the roundings
    of products of 10 terms and a root of a matrix whose condition number is below 1e3."""
    shapes = [(6, 10), (9, 4), (3, 8, 8), (5, 1), (7,)]
    params = [nn.Parameter(drawn(*s, seed=k)) for k, s in enumerate(shapes)]
    named = [(f"w{k}", p) for k, p in enumerate(params)]
    opt = optgen.compile(by_all, "fp32")(named, lr=0.02, backend=backend, blocks={"w2": 3})
    exact: list[Any] = [(p.detach().double(), None, None) for p in params]
    for t in range(1, 4):
        for k, p in enumerate(params):
            p.grad = drawn(*p.shape, seed=10 * t + k)
        opt.step()
        exact = [
            by_all.evaluate(p, q.grad.double(), t, kept, host, lr=0.02)
            for q, (p, kept, host) in zip(params, exact, strict=True)
        ]
    for q, (p, *_) in zip(params, exact, strict=True):
        assert (q.detach() - p).abs().max() <= 1e-4 * p.abs().max()


def test_the_lower_bound_of_a_spectral_norm_is_one() -> None:
    """For x = q d q' it is norm(x y) for a unit y, and at least the norm of the longest column."""
    for shape in ((3, 40, 12), (2, 2, 16, 16), (5, 1), (30, 200)):
        x = drawn(*shape)
        for square in (gram(x), gram(x) - identity(gram(x))):
            exact = torch.linalg.matrix_norm(square.double(), 2)[..., None, None]
            bound = norm_lower_bound(square)
            assert (bound <= exact * (1 + 8 * len(square) ** 0.5 * shape[-2] * U)).all()
            assert (bound >= square.norm(dim=-2).amax(-1)[..., None, None] * (1 - 8 * shape[-2] * U)).all()
    assert torch.equal(norm_lower_bound(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


@optimizer(cite="nobody", matrix="heads")
def averaging(
    p, g, t,
    left=matrix_state("rows"),
    right=matrix_state("columns"),
    *,
    lr=hyper(1e-2, ge=0),
    careful=flag(False),
):  # fmt: skip
    """Two averages, the second of what it was and of its square."""
    left = 0.5 * left + 0.25 * gram(g)
    right = 0.5 * right + 0.25 * right @ gram(g.T)
    if careful:
        right = g.T @ inverse_root(left, 2.0) @ g + right
    p = p - lr * (left @ g @ right)
    return p, left, right


def test_only_states_that_are_read_once_are_written_in_place() -> None:
    """A function in which LAPACK may raise an error leaves its operands as they are, too."""
    for careful, written in ((False, {"left"}), (True, set[str]())):
        step = rule_step(averaging, {"careful": careful}, "fast")
        (schedule,) = (x.schedule for x in step.stages if x.call == "whole")
        text = matrix_function(schedule, "made")
        scope: dict[str, Any] = {"torch": torch} | {x: getattr(matrices, x) for x in needs([text])}
        exec("\n".join(text), scope)
        given = {x: drawn(6, 6) + 6 * torch.eye(6) for x in schedule.sweep.reads}
        kept = {x: y.clone() for x, y in given.items()}
        scope["made"](*given.values(), *(2.0 for _ in schedule.program.host))
        assert {x for x in given if not torch.equal(given[x], kept[x])} == written
