"""Rules that work in the eigenbases of a matrix's statistics, beside oracles in the parameter's own space."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optgen import optim
from optgen.lang import eigenvectors, gram, normal, singular_vectors
from tests import harness
from tests.oracles import BASES, IN_BASES, KRON
from tests.test_against_papers import Steps, further, redrawn

STEPS, LR, EPS, NOISE = 50, 0.01, 0.05, 0.1
FEWER = {"cpp": 24, "triton": 14}
"""Steps of other backends, of which Triton's interpreter takes seconds: renewals after the turn are among them."""
TURN = 12
SHAPES = [(6, 10), (12, 5), (8, 8), (1, 7), (7, 1), (3, 8, 9), (6, 2, 3, 3), (7,), (10001, 4), (3, 10001)]
SIZES = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
OPTIONS = {"precondition_frequency": 4, "betas": (0.8, 0.9), "shampoo_beta": 0.6, "eps": EPS, "weight_decay": 0.1}
OPTIONS |= {"max_precond_dim": 10000}
CASES: dict[str, dict[str, Any]] = {
    "kl_shampoo": {k: v for k, v in OPTIONS.items() if k != "shampoo_beta"}
    | {"init_factor": 0.1, "max_clamp_value": 4.0},
    "shampoo": OPTIONS | {"matrix_eps": 1e-4, "root_order": 3.0},
    "soap": OPTIONS,
}
PERIOD = 5
OWN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "conda": (("basis",), {"betas": (0.8, 0.9), "eps": EPS, "weight_decay": 0.1, "update_proj_gap": PERIOD}),
    "splus": (
        ("basis_left", "basis_right"),
        {"betas": (0.8, 0.9), "ema_rate": 0.8, "weight_decay": 0.1, "nonstandard_constant": 0.2}
        | {"inverse_every": PERIOD, "max_precond_dim": 10000},
    ),
}
"""Rules in bases of their own, by the names of these, and options."""


def gradients(shape: tuple[int, ...], backend: str = "") -> Iterator[Tensor]:
    """Yield fp32 tensors whose singular values are nearly 4, 2, 1 and a half, along directions that stay; their order
    turns round after TURN steps, so that eigenvectors change places."""
    steps = FEWER.get(backend, STEPS)
    draw = torch.Generator().manual_seed(0)
    if len(shape) < 2:
        yield from (torch.randn(shape, generator=draw) for _ in range(steps))
        return
    stack = shape if len(shape) == 3 else (1, shape[0], math.prod(shape[1:]))
    rank = min(4, *stack[1:])
    u, v = (torch.linalg.qr(torch.randn(stack[0], n, rank, generator=draw, dtype=torch.float64)).Q for n in stack[1:])
    for t in range(steps):
        sizes = SIZES[:rank] if t < TURN else SIZES[:rank].flip(0)
        inner = sizes.diag() + NOISE * torch.randn(stack[0], rank, rank, generator=draw, dtype=torch.float64)
        yield (u @ inner @ v.mT).reshape(shape).float()


def allowed(shape: tuple[int, ...], t: int, unit: float) -> float:
    """A bound of t steps: roundings of a weight below 4, and those of sums (their root, as they have either sign) of
    rows and columns of a gradient of norm 5, by which a step changes by lr / eps at most, and a basis by 16 / .1875,
    the largest eigenvalue over the least distance."""
    sums = math.sqrt(shape[0] + math.prod(shape[1:]))
    return t * unit * (4 + 5 * LR / EPS * 16 / 0.1875 * sums)


def on_backends(names: Iterable[str], shapes: Iterable[tuple[int, ...]] = SHAPES) -> list[Any]:
    """(backend, rule, shape, setting): every other shape in eager torch, and those between in C++; of Triton's
    interpreter a third in turn, and of further settings one at one of the shapes, the others marked `full`."""
    turns = {"fp64": (1, 0), "reference": (2, 0), "cpp": (2, 1), "triton": (3, 0)}
    return [
        pytest.param(backend, name, shape, k, id=f"{backend}-{name}-{shape}" + f"-{k}" * (k > 0),
                     marks=pytest.mark.full if (i + j) % every != turn or (k and (k, i) != (1, j)) else ())
        for backend, (every, turn) in turns.items()
        for i, name in enumerate(names)
        for j, shape in enumerate(shapes)
        for k in (0, *(further(name) if backend == "fp64" else ()))
    ]  # fmt: skip


def rate(t: int) -> float:
    return LR * (1 - t % 3 / 4)


def begun(
    name: str, backend: str, shape: tuple[int, ...], options: Any, size: float = 1.0, named: bool = True
) -> Steps:  # fmt: skip
    """Return steps from a drawn weight; skip those of which the interpreter takes minutes."""
    if backend == "triton" and math.prod(shape) > 1000:
        pytest.skip("the interpreter takes minutes")
    start = size * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Steps(name, backend, start, LR, options, named)


@pytest.mark.parametrize(("backend", "name", "shape", "k"), on_backends(CASES))
def test_many_steps_are_the_oracle_s(name: str, shape: tuple[int, ...], k: int, backend: str) -> None:
    draw = random.Random(f"{name} {shape}")
    options = CASES[name] | {"betas": (draw.uniform(0.6, 0.9), draw.uniform(0.8, 0.95)), "eps": draw.uniform(EPS, 0.1)}
    options |= {"weight_decay": draw.uniform(0, 0.2), "precondition_frequency": draw.choice([3, 4, 5])}
    options = redrawn(name, k, shape, options)
    ours, oracle = begun(name, backend, shape, options), BASES[name]({}, options)
    exact = start = ours.weight
    for t, g in enumerate(gradients(shape, backend), 1):
        exact = oracle(exact, g.double(), t, rate(t))
        with harness.optimized() if name == "soap" and backend != "fp64" else nullcontext():
            ours(g, t, rate(t))
        assert ours.distance(exact).max() <= allowed(shape, t, 2.0**-53 if backend == "fp64" else 2.0**-24), t
    assert (exact - start).abs().max() > 0.01


@pytest.mark.parametrize(("backend", "name", "shape", "k"), on_backends(OWN))
def test_steps_in_bases_of_their_own(name: str, shape: tuple[int, ...], k: int, backend: str) -> None:
    """The oracle takes the rule's bases, which have to be orthogonal, to be renewed when they are due alone, and to
    diagonalize then what it has found.  A step changes by lr / eps times the gradient's error, twice at most, or where
    that error may change a sign in the bases, by what this sign moves."""
    (names, options), draw = OWN[name], torch.Generator().manual_seed(1)
    options, unit = redrawn(name, k, shape, options), 2.0**-53 if backend == "fp64" else 2.0**-24
    period = options["inverse_every" if name == "splus" else "update_proj_gap"]
    ours, seen, now = begun(name, backend, shape, options), {}, []
    exact = start = ours.weight
    torch.randn(shape, generator=draw)  # the weight's: gradients are those behind them
    more = {"bases": lambda k: [x[k] for x in now], "seen": seen, "matrix": 0, "scale": 0.25}
    oracle = IN_BASES[name]({}, more | options)
    loose, terms = torch.zeros(shape, dtype=torch.float64), math.sqrt(sum(shape[-2:]))

    def bases() -> list[Tensor]:
        kept = (ours.kept.get(x) for x in names)
        return [x.double().reshape(-1, *x.shape[-2:]).clone() for x in kept if isinstance(x, Tensor)]

    for t in range(1, FEWER.get(backend, STEPS) + 1):
        g, before = torch.randn(shape, generator=draw), bases()
        ours(g, t, rate(t))
        after = bases()
        before = before or [torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x) for x in after]
        now = after if name == "conda" else before
        exact, error = oracle(exact, g.double(), t, rate(t)), unit * terms * g.double().norm()
        due = (t - 1) % period == 0
        assert due or all(map(torch.equal, before, after))
        for k, of in seen.items():
            for q, x in zip((x[k] for x in after if due), of.sides, strict=due):
                inside = q.mT @ x @ q
                assert (inside - inside.diagonal().diag()).norm() <= 32 * unit * terms * x.norm()
                assert (q.mT @ q - torch.eye(len(q))).norm() <= 32 * unit * len(q)
            if name == "splus":
                moved = 2 * of.rate * (of.inside.abs() <= 8 * error).double()
                assert moved.count_nonzero() <= 0.05 * moved.numel() + 1
                left, right = (x[k].abs() for x in before) if of.sides else (None, None)
                loose.view(-1, *moved.shape)[k] += left @ moved @ right.mT if of.sides else moved
        most = loose + t * (8 * unit + 2 * LR / EPS * error)
        assert (ours.distance(exact) <= most).all(), t
        if name == "splus":
            average = torch.stack([seen[k].ema for k in sorted(seen)]).view(shape)
            assert ((ours.kept["ema"] - average).abs() <= most).all(), t
    assert (exact - start).abs().max() > 0.01


KRONS = [(6, 10), (12, 5), (8, 8), (2, 3), (1, 7), (7, 1), (7,), (1,), (8200, 4), (3, 8200)]
FULL = [(4, 10), (12, 4), (4, 4), (1, 7), (7, 1), (2, 3), (3, 3, 8), (5, 2), (4, 2, 3, 3), (7,)]


@pytest.mark.parametrize(("backend", "name", "shape", "k"), on_backends(["soap_muon"], FULL))
def test_soap_muon_is_the_record(backend: str, name: str, shape: tuple[int, ...], k: int) -> None:
    """First with a round that changes nothing: others amplify what is small in a direction.  In fp32 one may be rounded
    otherwise to bf16, by 2^-8 of an entry; rows of steps have norms of 6 at most, the floor times those of weights."""
    if backend == "fp64" and len(shape) == 3:
        pytest.skip("without blocks it is a convolution")
    options = {"momentum": 0.7, "shampoo_beta": 0.6, "eps": EPS, "weight_decay": 0.1, "row_floor": 1.5, "outward": 0.3}
    options |= {"lookahead": 0.4, "lookahead_beta": 0.8, "ns_steps": 1, "adamw_lr": LR, "adamw_betas": (0.8, 0.9)}
    options = redrawn(name, k, shape, options | {"max_precond_dim": 10000, "ns_coefficients": (1.0, 0.0, 0.0)})
    ours = begun(name, backend, shape, options, 1 / math.sqrt(shape[-1]))
    exact, start, oracle = ours.weight, ours.weight, BASES[name]({}, options)
    for t, g in enumerate(gradients(shape, backend), 1):
        exact = oracle(exact, g.double(), t, rate(t))
        ours.opt.param_groups[0]["base_lr"] = rate(t)  # so that AdamW's rate stays
        ours(g, t, rate(t))
        most = allowed(shape, t, 2.0**-53 if backend == "fp64" else 2.0**-24)
        most += t * LR * 6 * 2.0**-8 if backend != "fp64" and len(shape) > 1 else 0.0
        assert ours.distance(exact).max() <= most, t
    assert (exact - start).abs().max() > 0.05


@pytest.mark.parametrize(("backend", "name", "shape", "k"), on_backends(KRON, KRONS))
def test_psgd_kron_is_pytorch_optimizers(
    backend: str, name: str, shape: tuple[int, ...], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the same random numbers, for vectors ones.  Theirs are solved with in fp32.  An error of a factor reaches a
    step through two factors of either side, and those of earlier steps stay."""
    options = {"weight_decay": 0.1 if len(shape) > 1 else 0.0, "momentum": 0.7, "lr_precond": 0.1}
    options = redrawn(name, k, shape, options | {"max_precond_dim": 8192, "precondition_frequency": 1})
    if len(shape) > 1 and options["max_precond_dim"] < min(shape):
        pytest.skip("theirs has diagonals for both sides")
    ours = begun(name, backend, shape, options, named=False)
    start, other, most = ours.weight, nn.Parameter(ours.weight.clone()), 4 * 2.0**-24
    own = {"pre_conditioner_update_probability": 1 / options["precondition_frequency"]}
    own |= {"max_size_triangular": options["max_precond_dim"], "weight_decay": options["weight_decay"]}
    theirs = KRON[name]([other], momentum=options["momentum"], **own)
    theirs.param_groups[0]["precondition_lr"] = options["lr_precond"]
    for t, g in enumerate(gradients(shape, backend), 1):
        noise = normal(torch.zeros(shape), t) if len(shape) > 1 else torch.ones(shape)
        monkeypatch.setattr(torch, "randn_like", lambda x, noise=noise, **_: noise.to(x.dtype))
        other.grad, theirs.param_groups[0]["lr"] = g.double(), rate(t)
        theirs.step()
        ours(g, t, rate(t))
        factors = [q.diag() if q.ndim < 2 else q for q in theirs.state[other]["Q"] if len(q) < 99]
        bent = math.prod(float(torch.linalg.cond(q)) for q in factors)
        most += 2.0**-24 * (4 + LR * t * math.sqrt(sum(shape)) * bent**2)
        assert ours.distance(other.detach()).max() <= most, t
    assert (other - start).abs().max() > LR


@pytest.mark.parametrize("size", [1e13, 1e19, 1e30])
@pytest.mark.parametrize(
    "cls",
    [optim.KLShampoo, optim.Kron, optim.LowRankMuon, optim.SOAP, optim.SOAPMuon, optim.StableSPAM],
)
def test_a_gradient_whose_square_fp32_has_not_leaves_a_parameter_finite(cls: Any, size: float) -> None:
    p = nn.Parameter(torch.zeros(16, 30))
    often = {"precondition_frequency": 2} if "precondition_frequency" in {h.name for h in cls.HYPERS} else {}
    opt = cls([p], plan="fp32", **often)
    for t, g in enumerate(gradients((16, 30))):
        before, p.grad = p.detach().clone(), g * (size if t == 3 else 1.0)
        opt.step()
        assert p.isfinite().all() and (t < 1 or (p - before).abs().max() > 1e-6)
    assert all(x.isfinite().all() for x in opt.state[p].values() if isinstance(x, Tensor))


def test_kl_shampoo_divides_by_what_it_knew_before_the_gradient() -> None:
    """The momentum of 40 equal gradients is nearly one, and eigenvalues are at rest but for 2 % a step."""
    p, g, k = nn.Parameter(torch.zeros(16, 30)), torch.randn(16, 30, generator=torch.Generator().manual_seed(1)), 1e4
    opt, steps = optim.KLShampoo([p], plan="fp32", betas=(0.9, 0.98), weight_decay=0.0), []
    for t in range(41):
        before, p.grad = p.detach().clone(), g * (k if t == 40 else 1.0)
        opt.step()
        steps.append(float((p.detach() - before).norm()))
    assert steps[40] / steps[39] == pytest.approx((1 - 0.9) * k, rel=0.05)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("shape", "factor"), [((30,), "diagonal"), ((4, 30), "long"), ((4, 8), "left")], ids=str)
def test_kron_takes_no_factor_that_is_not_finite(shape: tuple[int, ...], factor: str, backend: str) -> None:
    """With a factor of 1e12 fp32 has no square of what it makes of a momentum of 1e9: all stay as they are."""
    p = nn.Parameter(torch.zeros(shape))
    opt = optim.Kron([p], plan="fp32", backend=backend, max_precond_dim=8, momentum=0.0)
    p.grad = torch.ones(shape)
    opt.step()
    opt.state[p][factor] *= 1e12
    kept, p.grad = opt.state[p][factor].clone(), torch.full(shape, 1e9)
    opt.step()
    assert torch.equal(opt.state[p][factor], kept) and p.isfinite().all()
    if factor == "long":
        opt.param_groups[0]["max_precond_dim"] = 30
        with pytest.raises(ValueError, match="with long, short, which it does not have under max_precond_dim=30"):
            opt.step()


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("name", ["eigh", "svd"])
def test_vectors_are_taken_in_fp64_where_fp32_fails(monkeypatch: pytest.MonkeyPatch, name: str, says: bool) -> None:
    """MKL's ssyevd returned NaN, and no error, for two of 256 eigenvalues of a Gram matrix with 158 rows of zeros."""
    x, function = next(gradients((5, 9))), getattr(torch.linalg, name)
    x, find = (gram(x), eigenvectors) if name == "eigh" else (x, lambda x: singular_vectors(x[:, :5], x))
    wanted = find(x)

    def refuses(x: Tensor, **options: bool) -> Any:
        if x.dtype != torch.float64 and says:
            raise torch.linalg.LinAlgError("failed to converge")
        return tuple(y if x.dtype == torch.float64 else y * math.nan for y in function(x, **options))

    monkeypatch.setattr(torch.linalg, name, refuses)
    found = find(x)
    assert found.dtype == x.dtype
    # By the gap of .1875 of 16 to the rank's directions; the last one is alone outside of them.
    assert ((found.mT @ wanted).abs() - torch.eye(5)).abs().max() <= 64 * 2.0**-24 * 16 / 0.1875


@pytest.mark.parametrize(("plan", "shape", "steps"), [("fp32", (12, 8), 300), ("int8", (64, 70), 30)])
def test_bases_stay_orthogonal(plan: str, shape: tuple[int, ...], steps: int) -> None:
    """Without a round of Newton-Schulz they part from it by 1e-7 in each refresh, without end; in 8 bits by .017."""
    p = nn.Parameter(torch.zeros(shape))
    opt = optim.SOAP([p], plan=plan, precondition_frequency=1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(shape, generator=draw)
        opt.step()
    for name in ("basis_left", "basis_right"):
        basis = opt.dense_state_dict()["state"][0][name]
        off = torch.linalg.matrix_norm(basis.mT @ basis - torch.eye(len(basis)), 2)
        assert off <= (len(basis) ** 2 * 2.0**-23 if plan == "fp32" else 0.02 + 0.02**2)  # of one encoding
