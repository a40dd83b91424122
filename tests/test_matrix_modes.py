"""Rules of whole matrices: odd specs against fp64, factors that there are not, numbers that are not finite."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen import optim
from optgen.lang import (
    eigenvectors,
    finite,
    gram,
    hyper,
    identity,
    inverse_root,
    matrix_state,
    optimizer,
    shape_flag,
    singular_vectors,
    solve_triangular,
    triangle,
)  # fmt: skip
from optgen.lang.spec import Spec
from optgen.optim import SOAP, KLShampoo, Muon, Shampoo, SOAPMuon, SPlus
from optgen.runtime import Optimizer
from optgen.runtime.work import matrices
from tests import training
from tests.harness import sampled, spec_of
from tests.product import OF_MATRICES
from tests.training import bits, give, train

SHAPES = [(6, 10), (9, 4), (3, 8, 8), (1, 5), (5, 1), (7,), (0, 4)]
def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rule(made: Callable[[Any, Any], Any]) -> Spec:
    """A rule whose matrix state is made by a function of its old value and the gradient."""

    @optimizer(cite="nobody", matrix="heads")
    def made_so(
        p, g, left=matrix_state("rows", when="is_matrix"),
        *,
        lr=hyper(0.1, ge=0), is_matrix=shape_flag(lambda shape: len(shape) >= 2 and max(shape[-2:]) <= 24),
    ):  # fmt: skip
        if is_matrix:
            left = left + made(left, g)
            p = p - lr * left @ g
        return p, left

    return made_so


# -- SOAP, whose bases begin at the first step of a parameter and change at every second one after it


def soap(backend: str, plan: str = "fp32", skip: Sequence[int] = (), **options: Any) -> Optimizer:
    named = [(f"w{k}", nn.Parameter(drawn(*s, seed=k))) for k, s in enumerate(SHAPES) if k not in skip]
    blocks = {} if 2 in skip else {"blocks": {"w2": 3}}
    options = {"precondition_frequency": 2, **blocks, **options}
    return SOAP(named, lr=0.02, backend=backend, plan=plan, **options)


@pytest.mark.parametrize("interval", [3, 7])
def test_refreshes_are_staggered(interval: int) -> None:
    """After the first step each parameter has a refresh every so many steps, and each step its share, of all groups and
    of every seventh parameter, as those of one shape lie in layers: within two of the first and at most two of these
    above it, which the constant that spreads them was searched for."""
    params = [nn.Parameter(drawn(3, 4, seed=k)) for k in range(70)]
    options: dict[str, Any] = {"plan": "fp32", "backend": "reference", "precondition_frequency": interval}
    opt = SOAP([{"params": params[:30]}, {"params": params[30:50]}], stagger=True, **options)
    opt.add_param_group({"params": params[50:]})
    found = []
    for step in range(2 * interval + 1):
        before = [opt.state[p].get("basis_left") for p in params]
        before = [None if x is None else x.clone() for x in before]
        train(opt, [step])
        pairs = zip(before, params, strict=True)
        found.append([x is None or not torch.equal(x, opt.state[p]["basis_left"]) for x, p in pairs])
    assert all(found[0]) and found[1 : interval + 1] == found[interval + 1 :]
    assert all(sum(on) == 1 for on in zip(*found[1 : interval + 1], strict=True))
    assert all(abs(sum(on) - 70 / interval) < 2 for on in found[1:])
    assert all(sum(on[k::7]) <= 10 / interval + 2 for on in found[1:] for k in range(7))
    with pytest.raises(ValueError, match="Muon: stagger=True spreads what is done every k steps"):
        Muon(params, stagger=True)


def fail(patch: pytest.MonkeyPatch, names: Sequence[str], when: Callable[[Tensor], Any], message: str) -> None:
    """Let these functions of torch.linalg raise for an operand of which that holds."""

    def failing(usual: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        if when(x):
            raise torch.linalg.LinAlgError(message)
        return usual(x, *rest, **options)

    for name in names:
        patch.setattr(torch.linalg, name, partial(failing, getattr(torch.linalg, name)))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("odd", ["singular", "nan", "raises"])
def test_a_factor_that_there_is_not(odd: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not finite for its own matrix; an error of a function names the parameter."""
    cls = optgen.compile(rule(lambda x, g: solve_triangular(identity(x), triangle(gram(g)))), "fp32")
    params = [nn.Parameter(drawn(6, 9, seed=k)) for k in range(3)]
    opt = cls([(f"w{k}", p) for k, p in enumerate(params)], backend=backend)
    give(params, 1)
    params[1].grad.fill_(0.0 if odd == "singular" else torch.nan)
    if odd == "raises":
        fail(monkeypatch, ["solve_triangular"], lambda x: not x.isfinite().all(), "no factor")
        with pytest.raises(RuntimeError, match=r"^parameter 'w1' \(float32 \[6, 9\]\): no factor"):
            opt.step()
    else:
        opt.step()
        assert [bool(x.isfinite().all()) for p in params for x in (p, opt.state[p]["left"])] == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
@pytest.mark.parametrize("cls", [SOAP, SOAPMuon, Shampoo, SPlus, KLShampoo])
def test_a_factor_that_is_not_finite_spoils_no_other(cls: Any, plan: str, backend: str) -> None:
    """The last basis or root stays, which a warning says once for a parameter; then the factor is made anew."""
    last = "root_left" if cls is Shampoo else "basis_left"
    made = []
    for damage in (False, True):
        params = [nn.Parameter(drawn(*s, seed=k)) for k, s in enumerate([(6, 10), (6, 10), (3, 8, 8)])]
        named, blocks = [(f"w{k}", p) for k, p in enumerate(params)], {"w2": 3}
        every = {"inverse_every" if cls is SPlus else "precondition_frequency": 2} if cls is not SOAPMuon else {}
        opt = cls(named, lr=0.02, plan=plan, backend=backend, blocks=blocks, **every)
        train(opt, range(3 if cls is Shampoo else 4))
        if damage:
            before = [opt.state[p] for p in params]
            key = "left" if "left" in before[1] else "left_diagonal"
            before[1][key].fill_(torch.nan)
            before[2][key][1].fill_(torch.inf)
        kept = [opt.state[p][last].clone() for p in params[1:]] if last in opt.state[params[1]] else []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(opt, [4])
            if damage and kept:  # a basis goes through a round of Newton-Schulz: 16 products and sums of at most 1.5
                now = [opt.state[p][last].flip(-1) if cls is SPlus else opt.state[p][last] for p in params[1:]]
                assert max((now[0] - kept[0]).abs().max(), (now[1] - kept[1])[1].abs().max()) <= 16 * 2.0**-23
            train(opt, range(5, 9))
        said = [str(w.message) for w in caught]
        assert [sum(f"'w{k}'" in text for text in said) for k in range(3)] == [0, damage, damage], said
        assert all(w.filename == training.__file__ for w in caught)
        held = [x for x in (*params, *opt.state[params[1]].values()) if isinstance(x, Tensor)]
        assert all(x.float().isfinite().all() for x in held)
        made.append(bits([params[0], params[2].detach()[[0, 2]]]))
    assert made[0] == made[1]


REFUSED = ("soap", "soap_muon", "kl_shampoo", "splus", "shampoo", "conda", "galore", "fira")
"""Rules that decompose."""
PERIODS = ("precondition_frequency", "inverse_every", "update_proj_gap")


def stepped(
    name: str, backend: str, sizes: Sequence[float], odd: float = 1.0
) -> tuple[list[nn.Parameter], list[str], Any]:
    """Parameters of one shape after eight steps of a rule, its warnings and its states; `odd` is in the last one's
    fifth gradient."""
    cls, several = getattr(optim, spec_of(name).class_name), range(len(sizes))
    params, known = [nn.Parameter(drawn(6, 10, seed=k)) for k in several], {h.name for h in cls.HYPERS}
    options = {k: 2 for k in PERIODS if k in known} | ({"rank": 3} if "rank" in known else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = cls([(f"w{k}", p) for k, p in enumerate(params)], plan="fp32", backend=backend, lr=0.02, **options)
        for t in range(8):
            for k, (p, size) in enumerate(zip(params, sizes, strict=True)):
                p.grad = size * drawn(6, 10, seed=10 * t + k)
            params[-1].grad[1, 2] *= odd if t == 4 else 1.0
            opt.step()
    return params, [str(w.message) for w in caught], [opt.state[p] for p in params]


@pytest.mark.parametrize("name", [*OF_MATRICES, "sinkgd"])
def test_a_gradient_that_is_not_finite_spoils_its_own_parameter_alone(name: str) -> None:
    """A NaN makes its weight NaN, as under AdamW; what `finite` keeps out of factors and bases is said once."""
    plain, *_ = stepped(name, "reference", (1, 1))
    for odd in (torch.nan, torch.inf):
        params, said, _ = stepped(name, "reference", (1, 1), odd)
        assert torch.equal(plain[0], params[0]) and (params[1].isnan().any() or odd == torch.inf)
        assert len(said) == (name in (*REFUSED, "psgd_kron")) and all("'w1'" in text for text in said)


ONE_NORM = ("adago", "apollo", "fira")
"""Rules that take one norm of all matrices of a parameter."""


@pytest.mark.filterwarnings("ignore")  # of factors that are not finite
@pytest.mark.parametrize(
    "name", sampled("a NaN in a stack", [x for x in OF_MATRICES if getattr(optim, spec_of(x).class_name).BLOCKS])
)
def test_a_nan_stays_in_its_matrix_of_a_stack(name: str) -> None:
    """Or reaches every one, of a rule that takes one norm of all of them."""
    found = []
    for odd in (1.0, torch.nan):
        p = nn.Parameter(drawn(3, 8, 10))
        opt = getattr(optim, spec_of(name).class_name)([("w", p)], plan="fp32", backend="reference", blocks={"w": 3})
        for t in range(4):
            p.grad = drawn(3, 8, 10, seed=t + 1)
            p.grad[1, 2, 3] *= odd if t == 1 else 1.0
            opt.step()
        found.append(p.detach())
    plain, got = found
    assert got.isnan().flatten(1).any(1).tolist() == [name in ONE_NORM, True, name in ONE_NORM]
    assert name in ONE_NORM or torch.equal(got[::2], plain[::2])


BY_LAPACK = [eigenvectors, lambda x: inverse_root(x, 2), lambda x: singular_vectors(x, x)]


@pytest.mark.parametrize("function", BY_LAPACK)
@pytest.mark.parametrize("odd", [torch.nan, 7.0])
def test_no_matrix_spoils_others_of_its_batch(function: Any, odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is not finite, or one of which LAPACK does not converge in either precision."""
    x = torch.stack([gram(drawn(4, 6, seed=k)) for k in range(3)])
    wanted = function(x)  # torch rounds products of a batch otherwise than those of one matrix
    x[1, 0, 0] = odd
    fail(monkeypatch, ["eigh", "svd"], lambda x: (x[..., 0, 0] == 7).any(), "failed to converge")
    found = function(x)
    assert torch.equal(found[::2], wanted[::2]) and found[1].isnan().all() and found.dtype == x.dtype
    assert torch.equal(finite(found, x)[1], x[1]) or odd != 7
    assert torch.equal(finite(found)[1], torch.zeros(4, 4)) and torch.equal(finite(found)[::2], wanted[::2])


# -- sweeps that C++ kernels leave to functions: copies of gradients, and weights to which the last product is added

ADDS, READS = {"conda", "galore", "kl_shampoo", "soap"}, {"apollo", "conda", "fira", "galore", "splus"}


class Products:
    """The products that are added to weights: where, fp64, and the bound of a sum in any order; twins make sweeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found, self.left, self.sweeps = list[tuple[Tensor, Tensor, Tensor]](), set[int](), False
        self.addmm, self.direct = torch.addmm, matrices.direct
        patch.setattr(torch, "addmm", self.add)
        patch.setattr(matrices, "direct", self.leave)

    def leave(self, *given: Any) -> Any:
        found = {} if self.sweeps else self.direct(*given)
        self.left |= {len(sweep.linear) for sweep in found.values()}
        return found

    def add(self, x: Tensor, *both: Tensor, beta: float, alpha: float, out: Tensor | None = None) -> Tensor:
        if out is not None:
            (left, right), count = (y.double() for y in both), both[0].shape[1]
            exact, most = beta * x.double() + alpha * (left @ right), (beta * x.double()).abs()
            most += abs(alpha) * (left.abs() @ right.abs())
            self.found.append((out, exact, (count + 4) * 2.0**-24 * most))
        return self.addmm(x, *both, beta=beta, alpha=alpha, out=out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plan", ["fp32", "int8_split24"])
@pytest.mark.parametrize("name", sorted({*ADDS, *READS, "muon", "psgd_kron"}))
def test_steps_without_sweeps_are_those_with_them(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients have the same bits, and a NaN reaches weights that a rate of 0 or a full decay leaves."""
    cls, seen, added = getattr(optim, spec_of(name).class_name), Products(monkeypatch), False
    params = [nn.Parameter(drawn(*shape, seed=k)) for k, shape in enumerate([(40, 24), (24, 56), (3, 8, 8), (7, 1)])]
    known = {h.name for h in cls.HYPERS}
    options = {k: 3 for k in PERIODS if k in known} | ({"rank": 4} if "rank" in known else {})
    groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:], "lr": 0.05, "weight_decay": 0.0}]
    opt = cls(groups, plan=plan, backend="cpp", **{"weight_decay": 0.1, **options})
    for t in range(8):
        opt.param_groups[0] |= [{}, {"lr": 0.0}, {"lr": 0.5, "weight_decay": 2.0}][max(t - 5, 0)]
        opt.param_groups[1]["maximize"] = t == 4
        give(params, t)
        params[0].grad[1, 2] *= torch.nan if t > 5 else 1.0
        twin = copy.deepcopy(opt)
        for p, q in zip(params, training.params_of(twin), strict=True):
            q.grad = p.grad.clone()
        seen.found.clear()
        opt.step()
        seen.sweeps = True
        twin.step()
        seen.sweeps = False
        swept = training.params_of(twin)
        assert bits([p.grad for p in params]) == bits([q.grad for q in swept])
        assert bits([opt.state[p] for p in params]) == bits([twin.state[q] for q in swept])
        bounds = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        for out, exact, most in seen.found:
            k = next(k for k, p in enumerate(params) if p.data_ptr() <= out.data_ptr() < p.data_ptr() + p.nbytes)
            at = (out.data_ptr() - params[k].data_ptr()) // 4
            bounds[k].view(-1)[at : at + out.numel()] = 2 * most.flatten()
            assert ((out - exact).abs() <= most).logical_or(exact.isnan()).all()
        for p, q, most in zip(params, swept, bounds, strict=True):
            assert torch.equal(p.isnan(), q.isnan())
            assert ((p - q).abs() <= most).logical_or(most.isnan() | p.isnan()).all(), (t, p.shape)
        added |= bool(seen.found)
    assert (1 in seen.left, 2 in seen.left, added) == (name in READS, name in ADDS, name in ADDS)
