"""States of low rank and random numbers, beside second texts in NumPy, and their rules beside the packages of them."""

import copy
import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.lang import normal
from optgen.runtime.records.keys import stream_key
from tests.oracles import LOW_RANK
from tests.test_against_papers import Steps, further, redrawn
from tests.training import sketched

U = 2.0**-24


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(x: Any) -> Any:
    """The hash of random numbers."""
    x = np.asarray(x, dtype=np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return x ^ x >> np.uint64(16)


def fractions(shape: tuple[int, int], name: str | int, matrix: int, key: int, which: int) -> Any:
    """24 random bits for each place, as a fraction: those of the matrix of that number of a parameter, which has a name
    or, for those that a spec is evaluated with, a position."""
    stream = stream_key(name)
    if isinstance(name, str):
        stream = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    begin = mixed((stream + matrix * 0x9E3779B1 + int(mixed(key))) % 2**32)
    place = 2 * np.arange(math.prod(shape)).reshape(shape) + which
    return (mixed((mixed(place) + begin) % np.uint64(2**32)) >> np.uint64(8)) / 2.0**24


def gaussian(shape: tuple[int, int], name: str | int, matrix: int, key: int) -> Any:
    a, b = (fractions(shape, name, matrix, key, which) + 2.0**-25 for which in (0, 1))
    return np.sqrt(-2 * np.log(a)) * np.cos(2 * math.pi * b)


def sketched_by_hand(g: list[Tensor], name: str, matrix: int, rank: int) -> tuple[Any, Any]:
    """The sum of the steps of `sketched`, and a bound of the distance of fp32 from the former: each of the
    terms of a sum is rounded once for each term after it."""
    total = low = size = bound = np.zeros(())
    for t, each in enumerate(g, 1):
        x = each.double().numpy()
        tall = x.shape[0] >= x.shape[1]
        x = x.T if tall else x
        r = min(rank, *x.shape)
        sketch = gaussian((x.shape[0], r), name, matrix, t)
        extra = gaussian((r, x.shape[1]), name, matrix, t + 7)
        low, size = low + sketch.T @ x + extra, size + abs(sketch.T) @ abs(x) + abs(extra)
        step, most = sketch @ low, abs(sketch) @ size
        total, bound = total + (step.T if tall else step), bound + (most.T if tall else most)
    return total, bound


SHAPES = [(6, 10), (10, 6), (8, 8), (2, 9), (7,), (3, 9, 8), (6, 10)]


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_random_numbers_are_those_of_the_hash_for_each_name_and_step(backend: str) -> None:
    """In batches, after a checkpoint, and of stacks; of a rank above the sides of a matrix there is as much as fits."""
    params = {f"w{i}": nn.Parameter(drawn(*s, seed=i)) for i, s in enumerate(SHAPES)}
    before = {name: p.detach().double().clone() for name, p in params.items()}
    grads = {name: [drawn(*p.shape, seed=9 + t) for t in range(4)] for name, p in params.items()}
    cls = optgen.compile(sketched, "fp32")

    def made() -> Any:
        few = [(name, p) for name, p in params.items() if name != "w6"]
        groups = [{"params": few}, {"params": [("w6", params["w6"])], "rank": 2}]
        return cls(groups, backend=backend, blocks={"w5": 3})

    opt = made()
    for t in range(4):
        if t == 2:
            saved, opt = copy.deepcopy(opt.state_dict()), made()
            opt.load_state_dict(saved)
        for name, p in params.items():
            p.grad = grads[name][t]
        opt.step()
    for name, p in params.items():
        if p.ndim < 2:
            assert not opt.state[p].keys() & {"low"}
            continue
        rank, matrices = 2 if name == "w6" else 4, p.detach().double().view(-1, *p.shape[-2:])
        for k, x in enumerate(matrices):
            each = [g.view(matrices.shape)[k] for g in grads[name]]
            total, bound = sketched_by_hand(each, name, k, rank)
            start = before[name].view(matrices.shape)[k].numpy()
            terms = sum(p.shape[-2:]) + 8
            assert (abs(start - total - x.numpy()) <= terms * U * (bound + abs(start) + abs(total))).all()
            assert opt.state[p]["low"].shape[-2:] == (min(rank, *p.shape[-2:]), max(p.shape[-2:]))


def test_numbers_are_normal() -> None:
    """Means of powers within five standard errors; those of neighbouring keys, parameters and matrices are others."""
    like = torch.zeros(4, 300, 400)
    x = normal(like, 3).double()
    n = math.sqrt(x.numel())
    for value, mean, deviation in (
        (x, 0, 1), (x**2, 1, math.sqrt(2)), (x**4, 3, math.sqrt(96)), (x * normal(like, 4).double(), 0, 1),
        *((x * x.roll(1, dim), 0, 1) for dim in range(3)),
    ):  # fmt: skip
        assert abs(value.mean() - mean) <= 5 * deviation / n


# -- rules

STEPS, LR, GAP, ONCE = 50, 0.01, 7, 60
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "galore": ("galore", 5, {"rank": 3, "scale": 0.25, "update_proj_gap": GAP}),
    "apollo": ("apollo", 20, {"rank": 4, "scale": 1.0, "update_proj_gap": GAP}),
    "apollo_mini": ("apollo", 2560, {"rank": 1, "scale": 128.0, "per_tensor": True, "update_proj_gap": GAP}),
    "fira": ("fira", 20, {"rank": 3, "alpha": 0.25, "update_proj_gap": ONCE}),
    "dion": ("dion", 20, {"rank": 3, "mu": 0.8}),
}
"""The rule, how far a step of lr = 1 changes by a gradient at most, and options."""
OPTIONS = {"betas": (0.9, 0.95), "eps": 0.05, "weight_decay": 0.1, "adamw": False}
SIZES = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64)
TEN = [(6, 10), (12, 5), (8, 8), (1, 7), (7, 1), (3, 8, 9), (6, 2, 3, 3), (7,), (1,), ()]


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    """fp32, of rank 4 at most, with singular values of 4, 2, 1 and a half, nearly; of length 1 to 3."""
    draw = torch.Generator().manual_seed(0)
    if len(shape) < 2:
        return [torch.randn(shape, generator=draw) for _ in range(STEPS)]
    stack = shape if len(shape) == 3 else (1, shape[0], math.prod(shape[1:]))
    count = min(4, *stack[1:])
    found = []
    for t in range(STEPS):
        sides = [torch.randn(stack[0], n, count, generator=draw, dtype=torch.float64) for n in stack[1:]]
        u, v = (torch.linalg.qr(x).Q for x in sides)
        found.append(((1 + t % 3) * u * SIZES[:count] @ v.mT).reshape(shape).float())
    return found


SETTINGS = [(backend, case, 0) for backend in ("fp64", "reference", "cpp") for case in CASES]
SETTINGS += [("fp64", case, k) for case in CASES if case != "apollo_mini" for k in further(case)]


@pytest.mark.parametrize(
    ("backend", "case", "k", "shape"),
    [pytest.param(*s, shape, marks=pytest.mark.full if s[2] and (s[2], i % 10) != (1, j) else ())
     for i, s in enumerate(SETTINGS) for j, shape in enumerate(TEN) if len(shape) != 3 or s[1] in ("dion", "galore")],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:This implementation of AdamW")
def test_rules_of_low_rank_are_their_oracles(case: str, shape: tuple[int, ...], k: int, backend: str) -> None:
    """The distance is that of roundings of a weight below 8 and of a gradient of norm 15, through a space that turns by
    its error over the least distance of singular values, 1/2, and steps that change by scale / eps at most.  Packages
    take each matrix of a stack by itself, where APOLLO and Fira limit the norm of all of them."""
    name, slope, given = CASES[case]
    label = "w" if backend != "fp64" else 0
    arguments = redrawn(name, k, shape, OPTIONS | given)
    arguments["rank"] = min(arguments["rank"], *shape) if len(shape) == 2 else arguments["rank"]
    if name == "fira":  # theirs renews at the multiples of the period, not after them
        arguments["update_proj_gap"] = (ONCE, 1)[k % 2]
    own = {"drawn": lambda shape, matrix, key: gaussian(shape, label, matrix, key), "per_tensor": False}
    step, ours = LOW_RANK[name]({}, own | arguments), Steps(name, backend, drawn(*shape, seed=1), LR, arguments)
    exact, start, unit = ours.weight, ours.weight, 2.0**-53 if backend == "fp64" else U
    for t, g in enumerate(gradients(shape), 1):
        lr = LR * (1 - t % 3 / 4)
        exact = step(exact, g.double(), t, lr)
        ours(g, t, lr)
        most = t * unit * (8 + LR * slope * (2 if k else 1) * 15 * 15 / 0.5 * math.sqrt(sum(shape)))
        assert ours.distance(exact).max() <= most, t
    assert (exact - start).abs().max() > 0.01


@pytest.mark.parametrize(("name", "given"), [("apollo", {}), ("fira", {"alpha": 0.0})])
def test_a_norm_grows_freely_from_0(name: str, given: dict[str, float]) -> None:
    """A matrix whose gradient is 0 at one step moves 1e-8 in the next by the package, and then 1 % more in each."""
    p = nn.Parameter(drawn(6, 10))
    opt = optgen.compile(name, plan="fp32")([p], plan="fp32", lr=0.1, weight_decay=0.0, **given)
    for t in range(2):
        before = p.detach().clone()
        p.grad = t * drawn(6, 10, seed=1)
        opt.step()
    assert (p - before).abs().max() > 1e-3


# -- states in two parts


def read_in_4_bits(state: dict[str, Any], name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A state as the formula of softsign(1/2) reads it, fp64, and the scale of each element; rows of whole blocks."""
    codes, scale = state[f"{name}_codes"], state[f"{name}_scale"].to(torch.int32)
    k = torch.stack([codes & 15, codes >> 4], -1).view(shape).double() - 8
    scales = ((scale << 15) & 0x7FFFFFFF).view(torch.float32).double().repeat_interleave(64, -1).view(shape)
    return scales * (k / 7) / (1.5 - 0.5 * (k / 7).abs()), scales


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_momentum_of_low_rank_reads_within_the_bound_of_its_residual(backend: str) -> None:
    """The error is the moving sum of stores to nearest, of half the variance of stochastic ones and smaller scales."""
    shape, signal = (64, 128), drawn(64, 4, seed=1)
    ours, plain = (nn.Parameter(torch.zeros(shape)) for _ in range(2))
    opts = [
        optgen.compile(name, plan="int4_split24")([p], plan="int4_split24", backend=backend, momentum=0.9)
        for name, p in (("low_rank_muon", ours), ("muon", plain))
    ]
    exact = bound = torch.zeros(shape, dtype=torch.float64)
    for t in range(40):
        g = signal @ drawn(4, 128, seed=2 + t // 20) + 0.1 * drawn(*shape, seed=100 + t)
        ours.grad = plain.grad = g
        for opt in opts:
            opt.step()
        state = opts[0].state[ours]
        rest, scales = read_in_4_bits(state, "momentum_buffer_residual", shape)
        exact = 0.9 * exact + 0.1 * g.double()
        # The widest cell of softsign(1/2) is the last one, which begins between codes 6 and 7, at 13/14.
        bound = 0.9 * bound + (1 - 13 / 14 / (1.5 - 13 / 28)) * scales + 64 * U * exact.abs().max()
        left, right = (state[f"momentum_buffer_{x}"].double() for x in ("left", "right"))
        errors = left @ right + rest - exact
        assert (errors.abs() <= bound).all(), t
    other = read_in_4_bits(opts[1].state[plain], "momentum_buffer", shape)[0] - exact
    assert left.shape == (64, 8) and right.shape == (8, 128)
    assert errors.square().sum() <= other.square().sum() / 2
