"""Functions of whole matrices beside torch.linalg in fp64, on tensors and in rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.base.errors import UserError
from optgen.lang import (
    bjorck,
    flag,
    gram,
    hyper,
    identity,
    inverse_root,
    low_rank_state,
    mat_max,
    matrix_state,
    newton_schulz,
    norm_lower_bound,
    optimizer,
    power_iteration,
    shape_flag,
    singular_vectors,
    svd_lowrank,
    unwide,
    wide,
)  # fmt: skip
from optgen.runtime.reference import matrices
from tests.test_matrices import drawn, exactly

U = 2.0**-24
SHAPES = [(3, 40, 12), (12, 40), (2, 2, 16, 16), (5, 1), (1, 1, 7)]


def spectrum(shape: tuple[int, ...], values: Tensor) -> Tensor:
    """A matrix in fp64 of these singular values and random singular vectors."""
    u, _, v = torch.linalg.svd(drawn(*shape).double(), full_matrices=False)
    return u * values @ v


@pytest.mark.parametrize("p", [1, 2, 4, 5, 10])
def test_roots_by_newton_are_those_by_eigenvalues(p: int) -> None:
    """With eps = 0, for condition numbers up to 1e4; x is rounded to fp32, which moves its smallest eigenvalue by n U
    times the largest and a root by that over p; a dozen of rounds round as much each."""
    for shape in ((3, 24, 24), (2, 2, 7, 7), (1, 1)):
        for condition in (1.0, 1e2, 1e4):
            n = shape[-1]
            q = torch.linalg.qr(drawn(*shape).double()).Q
            values = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
            x, wanted = 1e-3 * (q * values @ q.mT), q * (1e-3 * values) ** (-1 / p) @ q.mT
            for given, unit in ((x, 2.0**-53), (x.float(), U)):
                got = inverse_root(given, p, method="newton")
                assert got.dtype == given.dtype
                error = (got - wanted).norm(dim=(-2, -1)) / wanted.norm(dim=(-2, -1))
                assert (error <= 12 * (n + p) * condition * unit / p).all(), (shape, condition, error)
    x = gram(drawn(3, 6, 4))  # singular: eps counts, of a largest eigenvalue that is known to 6^(1/128)
    got, wanted = inverse_root(x, p, 1e-3, method="newton"), inverse_root(x.double(), p, 1e-3)
    assert (got - wanted).norm() <= 0.02 * wanted.norm()


def test_roots_that_newton_does_not_find_are_those_by_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Singular, not finite and 0: beside others, whose bits stay as they are."""
    x = torch.stack([gram(drawn(5, 9)), gram(drawn(5, 2)), torch.zeros(5, 5), torch.full((5, 5), torch.nan)])
    x = torch.cat([x, x[:1]])
    found = inverse_root(x, 2, method="newton")
    usual = inverse_root(x, 2)
    assert torch.equal(found[1:4], usual[1:4]) or found[3].isnan().all() and torch.equal(found[1:3], usual[1:3])
    assert torch.equal(found[0], found[4]) and not torch.equal(found[0], usual[0])
    monkeypatch.setattr(matrices, "inverse_root", None)
    assert torch.equal(inverse_root(x[[0, 4]], 2, method="newton"), found[[0, 4]])


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


def same_span(a: Tensor, b: Tensor) -> Tensor:
    """The sine of the largest angle between the spans of orthonormal columns."""
    return (a.double() - b @ (b.mT @ a.double())).norm(dim=(-2, -1)).max()


@pytest.mark.parametrize("shape", [(3, 40, 24), (24, 40), (2, 2, 30, 30)], ids=str)
def test_low_rank_functions_find_the_first_singular_vectors(shape: tuple[int, ...]) -> None:
    """Each step of power_iteration brings angles nearer by (s_5 / s_4)^2 = 1/16; a fall by 4 from each singular value
    to the next is more than svd_lowrank's oversampling and two iterations need for fp32."""
    x = spectrum(shape, 4.0 ** -torch.arange(min(shape[-2:]), dtype=torch.float64))
    u = torch.linalg.svd(x).U[..., :4]
    like = torch.zeros(*shape[:-1], 4)
    begin = torch.linalg.qr(u + 0.05 * drawn(*shape[:-1], 4, seed=1).double()).Q
    angles = [same_span(power_iteration(x, begin, steps), u) for steps in (0, 1, 2)]
    assert angles[1] <= angles[0] / 12 and angles[2] <= angles[1] / 12
    bound = 4**4 * 24 * U  # of the fourth vector in fp32: the gap is 3 / 4^4 of the norm
    assert same_span(power_iteration(x.float(), like), u) <= bound
    found = svd_lowrank(like, x.float())
    assert same_span(found, u) <= bound and (found.abs().amax(-2) == found.amax(-2)).all()
    assert (found - singular_vectors(like, x.float())).norm() <= 4 * bound
    again = [svd_lowrank(like, x.float(), key=key) for key in (0, 1)]
    assert torch.equal(found, again[0]) and not torch.equal(found, again[1])
    with pytest.raises(ValueError, match="rank 41 is above the shorter side of a matrix of"):
        svd_lowrank(torch.zeros(shape[-2], 41), x)
    bad = x.float().reshape(-1, *shape[-2:])
    bad[0, 0, 0] = torch.nan
    empty = torch.zeros(len(bad), shape[-2], 4)
    for made in (svd_lowrank(empty, bad), power_iteration(bad, empty)):
        assert made[0].isnan().all() and made[1:].isfinite().all()


SETS = {
    "simple": [(3.4445, -4.7750, 2.0315)] * 5,
    "quintic": [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)],
    "cans": [(8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630),
             (3.2866, -2.4647, 0.5074), (2.2737, -1.6447, 0.4162)],
    "aol": [(4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169)],
    "deepseekv4": [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2,
    "cubic5": [(3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
               (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0)],
}  # fmt: skip
"""The rounds of Emerging-Optimizers' sets, from its muon_utils.py."""


@pytest.mark.parametrize("name", SETS)
def test_sets_of_emerging_optimizers(name: str) -> None:
    """Against fp64 within roundings of bf16, as the sets of test_matrices.py; of fp16 for cans, which has no margin for
    roundings (in bf16 it is 0.14 away, as singular values pass the end of its interval)."""
    for shape in ((3, 64, 256), (24, 40)):
        exact = exactly(drawn(*shape), len(SETS[name]), SETS[name])
        made = newton_schulz(drawn(*shape), coefficients=name, gram=name == "cans")
        assert (made - exact).norm() <= (0.04 if name == "cans" else 0.03) * exact.norm()


@optimizer(cite="nobody", matrix="heads")
def by_newton(
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
    basis = svd_lowrank(basis, full, 1, t) if starts else power_iteration(full, basis, order)
    p = p - lr * inverse_root(left + identity(left), order, 1e-3, method="newton") @ bjorck(g / 10, order)
    p = p - lr * unwide(g, basis @ (basis.T @ full))
    return p, left, basis


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_rules_call_them(backend: str) -> None:
    """Each backend's step in fp32 against the rule's fp64 reading: relative to the largest value, within the roundings
    of products of 10 terms and a root of a matrix whose condition number is below 1e3."""
    shapes = [(6, 10), (9, 4), (3, 8, 8), (5, 1), (7,)]
    params = [nn.Parameter(drawn(*s, seed=k)) for k, s in enumerate(shapes)]
    named = [(f"w{k}", p) for k, p in enumerate(params)]
    opt = optgen.compile(by_newton, "fp32")(named, lr=0.02, backend=backend, blocks={"w2": 3})
    exact: list[Any] = [(p.detach().double(), None, None) for p in params]
    for t in range(1, 4):
        for k, p in enumerate(params):
            p.grad = drawn(*p.shape, seed=10 * t + k)
        opt.step()
        exact = [
            by_newton.evaluate(p, q.grad.double(), t, kept, host, lr=0.02)
            for q, (p, kept, host) in zip(params, exact, strict=True)
        ]
    for q, (p, *_) in zip(params, exact, strict=True):
        assert (q.detach() - p).abs().max() <= 1e-4 * p.abs().max()


def rule(made: Callable[[Any, Any, Any], Any]) -> Any:
    @optimizer(cite="nobody", matrix="heads")
    def made_so(
        p, g, left=matrix_state("rows", when="is_matrix"), low=low_rank_state("rows", rank="rank", when="is_matrix"),
        *,
        lr=hyper(0.1, ge=0), rank=hyper(2, ge=1, whole=True), is_matrix=shape_flag(lambda shape: len(shape) >= 2),
    ):  # fmt: skip
        if is_matrix:
            left = left + gram(g) + made(g, left, low)
            low = left @ low
            p = p - lr * left @ g
        return p, left, low

    return made_so


REFUSED: list[tuple[Callable[[Any, Any, Any], Any], str]] = [
    (lambda g, x, low: gram(inverse_root(g, 2, method="newton")), r"E206.*inverse_root\(\) takes a square matrix"),
    (lambda g, x, low: inverse_root(x, 2.5, method="newton"), r"E103.*inverse_root.* takes a whole number for its p"),
    (lambda g, x, low: inverse_root(x, 0, method="newton"), r"E103.*`inverse_root\(\)` takes p above 0, got 0\n"),
    (lambda g, x, low: inverse_root(x, 2, method="svd"), r"E113.*method='eigh' or method='newton', got 'svd'"),
    (lambda g, x, low: bjorck(x, 1.5), r"E103.*`bjorck\(\)` takes a whole number for its steps"),
    (lambda g, x, low: bjorck(x, 0), r"E103.*test_matrix_functions.py:\d+.*takes 1 or more steps, got 0.*with ge=1"),
    (lambda g, x, low: gram(power_iteration(g, low, -1)), r"E103.*takes 1 or more steps, got -1"),
    (lambda g, x, low: gram(svd_lowrank(low, g, -1)), r"E103.*takes a niter of 0 or more, got -1"),
    (lambda g, x, low: gram(svd_lowrank(low, g, 0.5)), r"E103.*`svd_lowrank\(\)` takes a whole number for its niter"),
    (lambda g, x, low: gram(svd_lowrank(g, g)), r"E206.*takes a basis .* and a matrix of d rows"),
    (lambda g, x, low: gram(power_iteration(g.T, low)), r"takes a basis.*got \(rows, rank\) and \(columns, rows\)"),
    (lambda g, x, low: gram(singular_vectors(g, g)), r"E206.*singular_vectors\(\) takes a basis \(d, rank\)"),
]


@pytest.mark.parametrize(("made", "message"), REFUSED)
def test_what_they_do_not_take_is_refused(made: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        optgen.compile(rule(made), "fp32")


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


@pytest.mark.parametrize("shape", [(5, 7), (3, 300, 300), (2, 9, 1)])
def test_an_average_in_place_has_the_bits_of_one_beside(shape: tuple[int, ...]) -> None:
    """Also where it is made in panels."""
    x, product = drawn(*shape), drawn(*shape).flip(-1)
    assert torch.equal(matrices.averaged(0.9, x, 0.1, product.clone()), 0.9 * x + 0.1 * product)


@optimizer(cite="a test", matrix="heads")
def by_largest(p, g, *, lr=hyper(1.0, ge=0), wide_enough=shape_flag(lambda shape: len(shape) >= 2)):
    p = p - lr * g / (mat_max(abs(g)) + 1e-30) if wide_enough else p - lr * g
    return p


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_each_matrix_has_its_largest_element(backend: str) -> None:
    p, g = nn.Parameter(torch.zeros(3, 9, 33)), drawn(3, 9, 33) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    opt = optgen.compile(by_largest, "fp32")([("w", p)], backend=backend, blocks={"w": 3})
    p.grad = g
    opt.step()
    assert (p + g / g.abs().amax((-2, -1), keepdim=True)).abs().max() <= 4 * U
