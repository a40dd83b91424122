"""Rules of whole matrices: stacks, heads and convolutions, against rules that are given each matrix by itself."""

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import optgen
from optgen.base.errors import UserError
from optgen.runtime.reference import matrices as reference

from optgen.lang import (  # isort: skip
    hyper, mat_norm, newton_schulz, norm, optimizer, shape_flag, top_rows,
)  # fmt: skip
from optgen.optim import SOAP, AdamMini, AdaMuon, Dion2, Muon, NorMuon, PolarGrad, Scion, SinkGD
from tests import harness

OF_MATRICES = (AdaMuon, Dion2, Muon, NorMuon, PolarGrad, Scion, SinkGD)
def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def followed(cls: Any, params: list[nn.Parameter], gradients: Callable[[int], list[Tensor]], **options: Any) -> Any:
    """Make four steps of an optimizer, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = cls([(f"w{i}", p) for i, p in enumerate(params)], lr=0.02, **options)
        for step in range(4):
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = g.clone()
            with harness.optimized() if cls is NorMuon else nullcontext():
                opt.step()
    return opt


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("cls", OF_MATRICES)
@pytest.mark.parametrize(
    ("shape", "blocks", "matrices"),
    [
        ((4, 16, 8), 4, (4, 16, 8)),
        ((3, 9, 33), 3, (3, 9, 33)),
        ((48, 20), 3, (3, 16, 20)),
        ((6, 5, 3, 3), 2, (2, 3, 45)),
        ((6, 9, 10), 2, (2, 3, 90)),
        ((2, 32, 20), 4, (4, 16, 20)),
        ((6, 9, 10), 1, (1, 6, 90)),
    ],
    ids=str,
)
def test_each_matrix_takes_the_steps_of_a_parameter_of_its_own(
    cls: Any, shape: tuple[int, ...], blocks: int, matrices: tuple[int, ...], backend: str
) -> None:
    whole = nn.Parameter(drawn(*shape))
    each = [nn.Parameter(x.clone()) for x in whole.detach().view(matrices)]
    options = {"plan": "fp32", "backend": backend}
    followed(cls, [whole], lambda step: [drawn(*shape, seed=1 + step)], blocks={"w0": blocks}, **options)
    followed(cls, each, lambda step: list(drawn(*shape, seed=1 + step).view(matrices)), **options)
    assert torch.equal(whole.view(matrices), torch.stack(list(each)))


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_top_rows_takes_a_part(fraction: float) -> None:
    with pytest.raises(UserError, match=f"fraction above 0 and up to 1, got {fraction}"):
        top_rows(torch.ones(2, 3), fraction)


@pytest.mark.parametrize("cls", OF_MATRICES)
def test_heads_in_8_bits_have_the_bits_of_a_stack_of_heads(cls: Any) -> None:
    options = {"blocks": {"w0": 8}, "plan": "int8_split24"}
    shapes = ((128, 96), (8, 16, 96), (2, 64, 96))  # heads of a matrix, a stack, heads of each matrix of a stack
    params = [nn.Parameter(drawn(*shape).bfloat16()) for shape in shapes]
    for p in params:
        followed(cls, [p], lambda step, p=p: [drawn(*p.shape, seed=step).bfloat16()], **options)
    assert all(torch.equal(params[0], p.view(128, 96)) for p in params[1:])


ROWS = (128, 64, 64)
SPANS = ("[0:128]", "[128:192]", "[192:256]")


@pytest.mark.parametrize(("dtype", "plan"), [(torch.float32, "fp32"), (torch.bfloat16, "int8_split24")], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("cls", [Muon, NorMuon])
def test_blocks_of_unequal_rows_are_parameters_of_their_own(cls: Any, backend: str, dtype: Any, plan: str) -> None:
    """As queries, keys and values under grouped queries: also in a later group, over a checkpoint, and released."""
    options = {"lr": 0.02, "plan": plan, "backend": backend}
    wholes = {name: nn.Parameter(drawn(256, 96, seed=k).to(dtype)) for k, name in enumerate("wv")}
    parts = {name: [nn.Parameter(x.clone()) for x in p.detach().split(ROWS)] for name, p in wholes.items()}
    apart = cls([(name + span, p) for name in "wv" for span, p in zip(SPANS, parts[name], strict=True)], **options)
    opt = cls([("w", wholes["w"])], blocks={"w": ROWS}, **options)
    opt.add_param_group({"params": [("v", wholes["v"])], "blocks": {"v": list(ROWS)}})
    for step in range(4):
        if step == 2:
            saved, opt = opt.state_dict(), cls([{"params": [x]} for x in wholes.items()], **options)
            opt.load_state_dict(saved)
            opt.release_gradients()
        gradient = drawn(256, 96, seed=9 + step).to(dtype)
        for name, p in wholes.items():
            (p * gradient).sum().backward()  # makes the step where gradients are released
            for q, x in zip(parts[name], gradient.split(ROWS), strict=True):
                q.grad = x.clone()
        for each in (opt, apart):
            each.step()
            each.zero_grad()
    for name, p in wholes.items():
        assert torch.equal(p, torch.cat(parts[name]))
        kept = [(key, x) for key, x in opt.state[p].items() if isinstance(x, Tensor)]
        assert kept and all(torch.equal(x, torch.cat([apart.state[q][k] for q in parts[name]])) for k, x in kept)


@optimizer(cite="nobody", matrix="heads")
def in_sums(p, g, *, lr=hyper(1e-3, ge=0), tall=shape_flag(lambda shape: len(shape) < 2 or shape[-2] > shape[-1])):
    p = p - lr * (g / (norm(g) + mat_norm(g) + 1e-9) if tall else newton_schulz(g))
    return p


UNEQUAL: list[tuple[Any, Any, str]] = [
    (SOAP, ROWS, "'w' of shape [256, 96] is no 3 matrices of 128, 64, 64 rows: left is kept for all rows together, not "
                 "for each; as heads these are 4 of 64 rows; otherwise make them parameters of their own"),
    (in_sums, ROWS, "tall holds for some of them only"),
    (in_sums, (128, 128), "the rule sums over the whole parameter"),
    (Muon, (128, 64), "'w' of shape [256, 96] has 256 rows, not 128 + 64"),
    *((Muon, rows, f"expected a number of blocks, or the rows of each, got {rows}")
      for rows in ((128, 128.0), (0, 256), (255, True), ())),
    (AdamMini, ROWS, "blocks have equal numbers of rows, got (128, 64, 64): as heads these are 4 of 64 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "rows", "message"), UNEQUAL, ids=str)
def test_blocks_of_unequal_rows_are_refused(cls: Any, rows: Any, message: str) -> None:
    cls = cls if isinstance(cls, type) else optgen.compile(cls, "fp32")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        cls([("w", nn.Parameter(drawn(256, 96)))], blocks={"w": rows})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.experts = nn.Conv1d(16, 8, 9), nn.Parameter(drawn(4, 16, 8))


@pytest.mark.parametrize("cls", [Muon, NorMuon])
def test_a_stack_is_told_from_a_convolution(cls: Any) -> None:
    """By shape, with a warning where that could be wrong, and by what the user says."""
    stacks = [(f"experts.{i}", nn.Parameter(torch.zeros(4, 16, 8))) for i in range(2)]
    words = r"'experts.0'.*stack of 4 matrices, such as .*, each by itself\.  Say so with blocks={'experts.0': 4}"
    with pytest.warns(UserWarning, match=words) as caught:
        opt = cls([{"params": stacks[:1]}, {"params": stacks[1:]}])
    assert (len(caught), caught[0].filename) == (1, __file__)
    quiet = [nn.Parameter(torch.ones(shape)) for shape in [(8, 16), (8, 16, 3), (8, 16, 3, 3), (8,)]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(quiet)
        cls([{"params": stacks, "adamw": True}])
        cls(stacks, blocks={"experts.*": 4})
        model = Net()
        opt = cls(model.named_parameters(), blocks={"conv.*": 1, "experts": 4}, plan="fp32")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    if cls is NorMuon:
        assert {name: list(opt.state[p]["row_sq"].shape) for name, p in model.named_parameters() if p.ndim > 1} == {
            "experts": [4, 16, 1], "conv.weight": [8, 1],
        }  # fmt: skip
    with pytest.raises(ValueError, match=r"'w' of shape \[8, 4\] has 8 rows, which do not fall into 3 equal blocks"):
        cls([("w", nn.Parameter(torch.zeros(8, 4)))], blocks={"w": 3})
    with pytest.raises(ValueError, match=r"'w' of shape \[4, 9, 8\] has 4 rows, which do not fall into 8 equal blocks"):
        cls([("w", nn.Parameter(torch.zeros(4, 9, 8)))], blocks={"w": 8})
    with pytest.raises(ValueError, match=r"'w' of shape \[4, 16, 8\] is a stack of matrices, which take a number"):
        cls([("w", nn.Parameter(torch.zeros(4, 16, 8)))], blocks={"w": (1, 3)})
    with pytest.raises(ValueError, match=r"'w' of shape \[24, 4\] has 24 rows, not 16 \+ 4 \+ 5"):
        cls([("w", nn.Parameter(torch.zeros(24, 4)))], blocks={"w": (16, 4, 5)})
    opt = cls([("w", nn.Parameter(torch.zeros(24, 4)))], blocks={"w": tuple(torch.tensor([16, 8]).numpy())})
    assert repr(opt.param_groups[0]["blocks"]) == "(('w', (16, 8)),)"


class Watch(TorchDispatchMode):
    """Counts operations, and the most bytes that their results hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.live, self.peak = Counter[str](), 0, 0

    def freed(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        if isinstance(out, Tensor) and all(r.alias_info is None for r in func._schema.returns):
            size = out.numel() * out.element_size()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(out, self.freed, size)
        return out


def test_batches_are_cut_where_they_pass_the_limit() -> None:
    """Beside the scratch of the step no more than five times the limit is in use, and bits stay, also one at a time."""
    found = []
    for limit, deterministic in ((2**28, False), (4 * 2 * 64 * 64, False), (2**28, True)):
        params = [nn.Parameter(drawn(*shape)) for shape in ((8, 64, 64), (64, 64), (3, 64, 64))]
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        opt = Muon(named, plan="fp32", backend="cpp", blocks={"w0": 8, "w2": 3})
        for p in params:
            p.grad = drawn(*p.shape, seed=1)
        opt.step()  # makes states
        opt.param_groups[0]["workspace"] = 2 * limit
        torch.use_deterministic_algorithms(deterministic)
        try:
            with Watch() as watch:
                opt.step()
        finally:
            torch.use_deterministic_algorithms(False)
        products = watch.calls["bmm"] + watch.calls["mm"]
        assert products == 5 * (12 if deterministic else 1 if limit == 2**28 else 3)
        scratch = 12 * 2 * 64 * 64
        assert watch.peak <= 5 * min(limit, scratch) + scratch
        found.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def exactly(x: Tensor, steps: int, rounds: list[tuple[float, float, float]]) -> Tensor:
    """Newton-Schulz in fp64 of what bf16 makes of x, by singular values: each goes through the polynomials."""
    left, values, right = torch.linalg.svd(x.to(torch.bfloat16).double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    for k in range(steps):
        a, b, c = rounds[min(k, len(rounds) - 1)]
        values = a * values + b * values**3 + c * values**5
    return left @ (values[..., None] * right)


EXPRESS = [
    (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.875, -1.25, 0.375),
]  # fmt: skip
JORDAN = (3.4445, -4.7750, 2.0315)
ROUNDS = {
    "jordan": (5, [JORDAN], 0.35),
    "polar_express": (5, EXPRESS, 0.15),
    "deepseek": (10, 8 * [JORDAN] + [(2.0, -1.5, 0.5)], 0.02),
    "cubic": (10, [(1.5, -0.5, 0.0)], 0.7),
}
"""Rounds and coefficients as the papers have them, and how far from 1 singular values of Gaussian matrices stay."""


@pytest.mark.parametrize("name", ROUNDS)
def test_named_coefficients_are_those_of_their_papers(name: str) -> None:
    """Against fp64, within roundings of bf16."""
    steps, rounds, near = ROUNDS[name]
    for shape in ((3, 64, 256), (256, 64), (30, 40), (40, 40), (8, 40)):
        x = drawn(*shape)
        made, exact = newton_schulz(x, coefficients=name), exactly(x, steps, rounds)
        assert (made - exact).norm() <= 0.03 * exact.norm()
        if name != "cubic" and shape[-2] != shape[-1]:
            assert (torch.linalg.svdvals(made) - 1).abs().max() <= near


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_groups_choose_their_coefficients(floor: float, backend: str) -> None:
    """Names, lists and triples, each in a group, before and after a checkpoint: the first step against fp64."""
    given: dict[str, Any] = {name: {"ns_coefficients": name} for name in ROUNDS}
    given["list"] = {"ns_coefficients": [list(t) for t in EXPRESS[:3]]}
    given["triple"] = {"ns_coefficients": EXPRESS[0], "ns_steps": 2}
    wanted = {name: (steps, rounds) for name, (steps, rounds, _) in ROUNDS.items()}
    wanted |= {"list": (3, EXPRESS[:3]), "triple": (2, EXPRESS[:1])}
    for shape in ((64, 32), (24, 40)):
        ps = [nn.Parameter(torch.zeros(shape)) for _ in given]
        groups = [{"params": [(name, p)], **x} for p, (name, x) in zip(ps, given.items(), strict=True)]
        opt = Muon(groups, lr=1.0, plan="fp32", backend=backend, scale_floor=floor)
        other = Muon([{"params": [(name, p)]} for p, name in zip(ps, given, strict=True)], plan="fp32", backend=backend)
        other.load_state_dict(opt.state_dict())
        other.param_groups[-2]["ns_coefficients"] = tuple(map(list, EXPRESS[:3]))  # as a schedule may
        assert [g["ns_steps"] for g in other.param_groups] == [steps for steps, _ in wanted.values()]
        for p in ps:
            p.grad = drawn(*shape, seed=3)
        other.step()
        scale = max(floor, shape[0] / shape[1]) ** 0.5
        for p, (steps, rounds) in zip(ps, wanted.values(), strict=True):
            exact = -scale * exactly(drawn(*shape, seed=3), steps, rounds)
            assert (p.detach() - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("coefficients", ["polar", (), [(1.0, 2.0)], (1.0, 2.0), ((1.0, 2.0, "x"),), 3])
def test_other_coefficients_are_refused(coefficients: Any) -> None:
    with pytest.raises(UserError, match=r"coefficients=\(a, b, c\), a list of such, or a name"):
        newton_schulz(torch.ones(2, 3), coefficients=coefficients)
    with pytest.raises(ValueError, match=r"Muon: ns_coefficients must be \(a, b, c\).*'polar_express', 'deepseek'"):
        Muon([nn.Parameter(torch.ones(2, 3))], ns_coefficients=coefficients)


@pytest.mark.parametrize("wrong", ["lots", "5MB", -1, 0, 0.5, True])
def test_other_workspaces_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"Muon: workspace must be a number of bytes >= 1, or as in '512MiB'"):
        Muon([nn.Parameter(torch.ones(2, 3))], workspace=wrong)


@pytest.mark.parametrize("shape", [(1031, 1040), (2, 1030, 1024)])
def test_symmetric_products_by_blocks_have_the_bits_of_whole_ones(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = drawn(*shape), []
    for rows in (reference.LARGE, 2000):
        monkeypatch.setattr(reference, "LARGE", rows)
        found.append(reference.newton_schulz(x, 2, 1, 1e-7, 3.4445, -4.775, 2.0315))
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(257, 300), (3, 300, 70), (2, 2, 260, 130)])
def test_grams_by_blocks_have_the_bits_of_whole_products(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    assert shape[-2] >= reference.LARGE // 4 and torch.equal(reference.gram(x), x @ x.mT)


@pytest.mark.parametrize("wide", [True, False])
def test_products_are_computed_where_they_are_stored(wide: bool) -> None:
    like, x = torch.empty((20, 300) if wide else (300, 20)), reference.Product(drawn(20, 8), drawn(8, 300))
    y, out = reference.unwide(like, x), torch.empty_like(like)
    assert y.computed([out]) is out and torch.equal(out, reference.unwide(like, x.left @ x.right))
    for others in ([], [out.bfloat16()], [out, out]):
        assert torch.equal(y.computed(others), out)
