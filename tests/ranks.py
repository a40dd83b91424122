"""Check that parameters of several ranks are trained as if they were on one.

    python -m pytest -m ranks                          processes of this machine, gloo: 2, 4, 3 and 1 ranks
    python -m tests.ranks --ranks 2 fully_sharded      one case; TRITON_INTERPRET=1 for those of Triton on a CPU
    torchrun --nproc-per-node 4 -m tests.ranks         the ranks that torchrun starts: NCCL where there are GPUs

Every case prints its name when all ranks have passed it. The first failure ends the run with 1, and so does a rank
that waits longer than --timeout seconds for another one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # as the first DTensor does: once, before there are ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import optgen
import specs.plans
from optgen import optim
from optgen.accumulate import accumulator
from optgen.driver import targets
from optgen.formats import Plan
from optgen.lang import (
    amax,
    flag,
    gram,
    hyper,
    inverse_root,
    matrix_state,
    optimizer,
    orthogonal,
    qr,
    shape_flag,
    state,
    symmetric,
    trace,
)  # fmt: skip
from optgen.ops import dtypes
from optgen.runtime import files
from optgen.runtime.checkpoint import checkpoint
from optgen.runtime.layout import messages, plans, sharded_states, sharding
from optgen.runtime.records.fp32_modules import keep_states_fp32
from optgen.runtime.reference import matrices
from optgen.verify.differential import Values, compare, enclose, oracle
from optgen.verify.intervals import FAST
from tests.harness import plan_of, spec_of, unoptimized
from tests.interpreter import quicken
from tests.training import sketched

RANKS = (2, 4, 3, 1)
"""The others load what two ranks have saved."""
SEED = 20


@dataclass
class Here:
    """The setting of a case: its rank, the kind of device, the backend of the kernels, a folder that all runs share."""

    rank: int
    world: int
    device: str
    backend: str
    folder: Path
    meshes: dict[tuple[int, ...], DeviceMesh] = field(default_factory=dict)

    def mesh(self, *shape: int) -> DeviceMesh:
        names = ("outer", "inner")[-len(shape) :]
        if shape not in self.meshes:
            self.meshes[shape] = init_device_mesh(self.device, shape, mesh_dim_names=names)
        return self.meshes[shape]

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, the same on all ranks."""
        return torch.randn(shape, generator=self.random).to(self.device, dtype)

    def restart(self) -> None:
        self.random = torch.Generator().manual_seed(SEED)


Check = Callable[[Here], None]


@dataclass(frozen=True)
class Case:
    """A check, the numbers of ranks that it is for, daily and others, and the backends that it is run with on CPUs."""

    check: Check
    daily: tuple[int, ...]
    further: tuple[int, ...]
    kernels: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(*daily: int, further: tuple[int, ...] = (), kernels: tuple[str, ...] = ("reference",)) -> Callable[..., Check]:
    """Add a check to `CASES`.  In eager torch every rank steps whole matrices, which those of kernels ask not to."""

    def add(check: Check) -> Check:
        CASES[check.__name__] = Case(check, daily, further, kernels)
        return check

    return add


def chosen(world: int, of: str = "all", only: Sequence[str] = (), kernels: str = "") -> list[tuple[str, str]]:
    """The cases for so many ranks, and the backend of each run of them: `kernels`, or else those of the case."""
    found = [one for name, one in CASES.items() if not only or name in only]
    found = [x for x in found if world in x.daily * (of != "further") + x.further * (of != "daily")]
    return [(x.check.__name__, backend) for x in found for backend in ((kernels,) if kernels else x.kernels)]


# -- two runs beside each other ---------------------------------------------------------------------------
@dataclass
class Piece:
    """A parameter: its value, and how it lies."""

    value: Tensor
    mesh: DeviceMesh | None = None
    placements: Sequence[Any] = ()

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that lies as the parameter does."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None) if self.mesh else whole.clone()

    def parameter(self, sharded: bool) -> nn.Parameter:
        return nn.Parameter(self.of(self.value) if sharded else self.value.clone())


class Runs:
    """A rule over the same parameters twice: whole on every rank, and in parts."""

    def __init__(self, here: Here, cls: Any, pieces: Sequence[Piece], **options: Any) -> None:
        self.here, self.pieces = here, pieces
        self.alone = [piece.parameter(False) for piece in pieces]
        self.parts = [piece.parameter(True) for piece in pieces]
        options = {"lr": 1e-2, "backend": here.backend, **options}
        if "lr" in options and not any(h.name == "lr" for h in cls.HYPERS):
            del options["lr"]
        self.one, self.many = cls(self.alone, **options), cls(self.parts, **options)

    def step(self, count: int = 1) -> None:
        """Both make so many steps and are the same."""
        for _ in range(count):
            self.draw()
            self.one.step()
            self.many.step()
        self.same()

    def draw(self) -> None:
        self.give(lambda piece: self.here.values(*piece.value.shape, dtype=piece.value.dtype))

    def give(self, gradient: Callable[[Piece], Tensor]) -> None:
        for piece, p, q in zip(self.pieces, self.alone, self.parts, strict=True):
            value = gradient(piece)
            p.grad, q.grad = value, piece.of(value)

    def sides(self) -> list[tuple[list[nn.Parameter], Any]]:
        return [(self.alone, self.one), (self.parts, self.many)]

    def another(self, saved: dict[str, Any], params: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], Any]:
        """Copies of parameters, and an optimizer of theirs that has loaded a state dict."""
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        group = self.one.param_groups[0]
        opt = type(self.one)(copies, lr=group["lr"], plan=group["plan"], backend=group["backend"])
        opt.load_state_dict(saved)
        return copies, opt

    def same(self) -> None:
        """The parts are those of the run on one rank, bit for bit."""
        for k, (p, q) in enumerate(zip(self.alone, self.parts, strict=True)):
            alike(p.detach(), q.detach(), f"parameter {k}")
            alike_states(self.one, p, self.many, q, f"parameter {k}, {list(p.shape)}")


def alike(whole: Tensor, part: Tensor, what: str) -> None:
    """`part` is this rank's part of `whole`, bit for bit."""
    if isinstance(part, DTensor):
        assert part.shape == whole.shape, (what, part.shape, whole.shape)
        whole, part = sharding.part_of(whole, sharding.layout_of(part)), part.to_local()
    assert part.shape == whole.shape, (what, part.shape, whole.shape)
    same = torch.eq(*(x.clone(memory_format=torch.contiguous_format).ravel().view(torch.uint8) for x in (whole, part)))
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} bytes differ"


def alike_states(one: Any, p: Tensor, many: Any, q: Tensor, what: str) -> None:
    """The states of q are this rank's parts of those of p."""
    assert one.state[p].keys() == many.state[q].keys(), (what, one.state[p].keys(), many.state[q].keys())
    for name, value in one.state[p].items():
        if isinstance(value, Tensor):
            alike(value, many.state[q][name], f"{name} of {what}")
        else:
            assert value == many.state[q][name], (what, name, value, many.state[q][name])


def everywhere(x: Tensor) -> None:
    """x is the same on all ranks, bit for bit."""
    data = x.detach().contiguous().reshape(-1).view(torch.uint8)
    found = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(found, data)
    assert all(torch.equal(data, other) for other in found)


def whole(x: Tensor) -> Tensor:
    """A copy of all of a DTensor, in any dtype: gloo itself sends no int16."""
    return messages.full(x).detach().clone()


def refused(error: type[BaseException], *words: str) -> Any:
    """Assert that the block raises an error whose message has these words."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


@contextmanager
def one_at_a_time(deterministic: bool) -> Iterator[None]:
    """Matrices have the bits that they have alone: on CUDA those of a batch depend on how many there are."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows(here: Here, mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Piece]:
    """Parameters cut along dimension 0."""
    return [Piece(here.values(*shape, dtype=dtype), mesh, [Shard(0)]) for shape in shapes]


# Rows that end within a block, fewer rows than ranks, vectors with and without whole blocks, a stack, one number.
UNEVEN = [(97, 130), (64, 256), (3, 1500), (7,), (4160,), (8192,), (5, 3, 16, 16), (1, 5000)]


# -- bit for bit the run on one rank ------------------------------------------------------------------------
TWO = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
]
"""Ways to lie over 2 by 2 ranks: hybrid sharding, fully sharded with tensor parallelism, and both dimensions cut."""


def over_two(here: Here, *shape: int) -> list[Piece]:
    """Parameters in each of these ways, on four ranks."""
    lie = TWO if here.world == 4 else []
    return [Piece(here.values(*shape, dtype=torch.bfloat16), here.mesh(2, 2), kind) for kind in lie]


@case(2, 4, further=(3,))
def element_wise_rules(here: Here) -> None:
    """Uneven parts, ranks without rows, vectors; columns in whole blocks, or any number without blocks; replicas; all
    in one group, with meshes of two dimensions."""
    n, mesh = here.world, here.mesh(here.world)
    in_blocks = [(40, 128 * n), (40, 64 * n), (40, 128 * n - 1), (5, 64 * n, 3, 3)]
    unlike = [(40, 26 * n + 1), (1000, 3), (9, 1601), (6, 2 * n, 3, 3)]
    for cls, plan, columns in (
        (optim.AdamW, "int8_split24", in_blocks),
        (optim.AdamW, "split32", []),
        (optim.AdamW, "bf16_sr", unlike),
        (optim.AdamW, "fp32_master", [(40, 26 * n + 1), (3, 4, 5, 7)]),
        (optim.Lion, "int8_split24", []),
    ):
        pieces = rows(here, mesh, UNEVEN, torch.bfloat16)
        pieces += [Piece(here.values(*shape, dtype=torch.bfloat16), mesh, [Shard(1)]) for shape in columns]
        pieces += [Piece(here.values(33, 65, dtype=torch.bfloat16), mesh, [Replicate()])]
        pieces += [Piece(here.values(65, dtype=torch.bfloat16))]
        if plan == "fp32_master":
            pieces += [Piece(here.values(4, 5, 6, dtype=torch.bfloat16), mesh, [Shard(2)])]
        if columns and n == 4:
            pieces += over_two(here, 36, 256)
            for shape, kind in (((8192 + 64,), TWO[0]), ((8192 + 64,), TWO[1]), ((70, 64), TWO[3])):  # 18 and 17 rows
                pieces.append(Piece(here.values(*shape, dtype=torch.bfloat16), here.mesh(2, 2), kind))
        Runs(here, cls, pieces, plan=plan).step(2)


@case(2)
def rows_under_every_plan(here: Here) -> None:
    """Take every plan without sums of rows and columns: a matrix of codes and a vector, cut unevenly."""
    found = [name for name, plan in vars(specs.plans).items() if isinstance(plan, Plan) and "factor" not in name]
    for name in found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of plans that exist for comparison
            pieces = rows(here, here.mesh(2), [(17, 256), (4160,)], torch.bfloat16)
            Runs(here, optim.AdamW, pieces, plan=name).step(2)


@case(2, further=(3,))
def inputs_and_two_gradients(here: Here) -> None:
    """Inputs that every rank has whole, in the parameter's parts or replicated; SAM's norms are over all ranks."""
    mesh = here.mesh(here.world)
    runs = Runs(here, optim.Sophia, rows(here, mesh, UNEVEN, torch.bfloat16), plan="int8_split24")
    for cut in (None, [Shard(0)], [Replicate()]):
        values = [here.values(*piece.value.shape) for piece in runs.pieces]
        runs.one.feed(hessian=values)
        runs.many.feed(hessian=[distribute_tensor(x, mesh, cut) if cut else x for x in values])
        runs.step()
    saved = [kept["hessian"] for kept in runs.many.state_dict()["state"].values()]  # freed, and whole where it is saved
    assert all(x.to_local().is_contiguous() and whole(x).eq(0).all() for x in saved)
    with refused(ValueError, "must be [97, 130]"):
        runs.many.feed(hessian={runs.parts[0]: distribute_tensor(here.values(97, 131), mesh, [Shard(0)])})
    two = optgen.compile("gsam(adamw)", plan="fp32")
    for cls, plan in ((optim.AdamW, "int8_split24"), (two, "fp32")):
        far = {"rho": 300.0} if cls is two else {}
        runs = Runs(here, cls, rows(here, mesh, UNEVEN, torch.bfloat16), plan=plan, **far)
        opts = [opt if cls is two else optgen.SAM(opt, rho=300.0) for _, opt in runs.sides()]
        for second in (False, True) * 2:
            runs.draw()
            for opt in opts:
                (opt.second_step if second else opt.first_step)()
            for p, q in zip(runs.alone, runs.parts, strict=True):  # their norms are sums in another order
                torch.testing.assert_close(p.detach(), whole(q), rtol=2.0**-6, atol=2.0**-6)


@case(2, further=(3,), kernels=("cpp",))
def stacks_and_heads(here: Here) -> None:
    """Ranks have whole experts and whole heads; a head that two ranks share is refused."""
    mesh = here.mesh(here.world)
    for cls in (optim.Muon, optim.NorMuon):
        pieces = rows(here, mesh, [(5, 16, 24), (6, 9, 72), (1, 64, 40)], torch.bfloat16)
        pieces += rows(here, mesh, [(8 * here.world, 20)], torch.bfloat16)
        if cls is optim.Muon:  # it sums over nothing, so that matrices may be cut, too
            pieces.append(Piece(here.values(3, 8 * here.world, 64, dtype=torch.bfloat16), mesh, [Shard(1)]))
        with one_at_a_time(here.device == "cuda"):
            Runs(here, cls, pieces, plan="int8_split24", blocks={"numel <= 480": 2 * here.world}).step(2)
        with refused(ValueError, "multiple of the", "`blocks`"):
            cls([Piece(here.values(36, 8), mesh, [Shard(0)]).parameter(True)], blocks={"numel > 0": 1 + here.world})
        with refused(ValueError, "divides each matrix of a stack"):
            stack = Piece(here.values(2 * here.world, 8, 16), mesh, [Shard(0)]).parameter(True)
            cls([stack], blocks={"numel > 0": 4 * here.world})


@optimizer(cite="none: as SOAP, without sums over elements", matrix="heads")
def factors(
    p, g, momentum=state(),
    left=matrix_state("rows", symmetric, when="is_matrix", init=0.01),
    basis=matrix_state("columns", orthogonal, when="is_matrix", init="identity"),
    *,
    lr=hyper(1e-3, ge=0),
    k=hyper(2, ge=1),
    turns=flag(every="k"),
    is_matrix=shape_flag(lambda shape: len(shape) > 1),
):  # fmt: skip
    if not is_matrix:
        p = p - lr * g
        return p, momentum, left, basis
    left = 0.9 * left + 0.1 * gram(g) / (1 + amax(g * g))
    momentum = 0.9 * momentum + 0.1 * g @ basis
    p = p - lr * (inverse_root(left, 4, 1e-3) @ momentum @ basis.T) / trace(left)
    if turns:
        basis = qr(gram(g.T) @ basis)
    return p, momentum, left, basis


FACTORS = [(17, 30), (2, 60), (70, 70), (5, 16, 24), (9, 4, 3, 3), (1, 120)]


@case(2, further=(3,), kernels=("cpp",))
def matrix_states(here: Here) -> None:
    """Each rank keeps rows of the factors of a matrix, or the factors of its matrices of a stack."""
    n, mesh = here.world, here.mesh(here.world)
    pieces = rows(here, mesh, [*FACTORS, (130,), (8 * n, 3)], torch.bfloat16)
    across = [Piece(here.values(*shape, dtype=torch.bfloat16), mesh, [Shard(1)]) for shape in ((3, 8, 9), (9, 8 * n))]
    for cls, plan, name, room in (
        (optgen.compile(factors, plan="fp32"), "fp32", "left", None),
        (optgen.compile(factors, plan="int8_split24"), "int8_split24", "left", 8 * 16 * 24),
        (optgen.compile(sketched, plan="fp32"), "fp32", "low", 8 * 16 * 24),
        (optim.SOAP, "int8_split24", "left", None),
        (optim.LowRankMuon, "int4_split24", "momentum_buffer_left", None),
        (optim.Conda, "int8_split24", "basis", None),
        (optim.Kron, "int8_split24", "left", None),
        (optim.GaLore, "int8_split24", "low_avg", None),
    ):
        some = [*pieces, *(across if plan == "fp32" else across[1:])]
        with one_at_a_time(True):
            more = {"stagger": True, "precondition_frequency": 2} if cls is optim.SOAP else {}
            runs = Runs(here, cls, some, plan=plan, blocks={"numel <= 96": n}, workspace=room, **more)
            runs.step(3)
        key = next(k for k in runs.many.state[runs.parts[2]] if k in (name, f"{name}_diagonal", f"{name}_codes"))
        assert runs.many.state[runs.parts[2]][key].to_local().shape[0] <= -(-70 // n)


@case(2, kernels=("cpp",))
def an_infinity_on_one_rank(here: Here) -> None:
    """A GradScaler that meets it skips the step on all ranks; a group is added late."""
    mesh = here.mesh(2)
    pieces = rows(here, mesh, [(17, 30), (5, 16, 24)], torch.bfloat16)
    runs = Runs(here, optim.SOAP, pieces, plan="int8_split24", precondition_frequency=2, stagger=True)
    scaler = torch.amp.GradScaler(here.device, init_scale=1024.0)
    for k in range(4):
        if k == 2:
            runs.pieces = [*pieces, *rows(here, mesh, [(6, 40)], torch.bfloat16)]
            for (params, opt), sharded in zip(runs.sides(), (False, True), strict=True):
                params.append(runs.pieces[-1].parameter(sharded))
                opt.add_param_group({"params": params[-1:], "lr": 2e-2})
        runs.draw()
        with one_at_a_time(True):
            runs.one.step()
            scaler.scale(torch.zeros((), device=here.device))
            for lost in (True, False):
                grads = [q.grad.clone() for q in runs.parts]
                for q in runs.parts:
                    q.grad *= scaler.get_scale()
                if lost and here.rank == 1:
                    runs.parts[0].grad.to_local()[0, 0] = torch.inf
                scaler.step(runs.many)
                scaler.update()
                for q, g in zip(runs.parts, grads, strict=True):
                    q.grad = g
        runs.same()


@case(2, 4, further=(3,), kernels=("cpp",))
def matrices_have_one_worker(here: Here) -> None:
    """Each is worked on once, in one round or several, and no replica repeats it; if that fails, no rank waits."""
    mesh = here.mesh(here.world)
    pieces = rows(here, mesh, [(97, 130), (64, 96), (2, 200), (5, 16, 24), (7, 3, 3, 24), (72, 4)], torch.bfloat16)
    blocks = {"numel < 300": (40, 24, 8)}
    pieces.append(Piece(here.values(40, 64 * here.world, dtype=torch.bfloat16), mesh, [Shard(1)]))
    if here.world == 4:
        mesh = here.mesh(2, 2)
        pieces += over_two(here, 36, 256)
        pieces.append(Piece(here.values(6, 16, 24, dtype=torch.bfloat16), mesh, TWO[0]))
        half = init_device_mesh(here.device, (2, 2, 1), mesh_dim_names=("a", "b", "c"))["a", "c"]
        pieces.append(Piece(here.values(33, 64, dtype=torch.bfloat16), half, [Shard(0), Replicate()]))
        pieces.append(Piece(here.values(72, 4, dtype=torch.bfloat16), mesh, TWO[0]))
    single = sum(len(piece.value) if piece.value.ndim == 3 else 1 for piece in pieces) + (here.world == 4)
    expected = single + 2 * sum(piece.value.numel() < 300 for piece in pieces)
    runs, worked = Runs(here, optim.Muon, pieces, plan="int8_split24", blocks=blocks), torch.zeros(())
    function, fails = matrices.newton_schulz, False

    def counted(x: Tensor, *given: float) -> Tensor:
        worked.add_(len(x) if x.ndim == 3 else 1)
        if fails:
            raise ArithmeticError("on this rank")
        return function(x, *given)

    for room in (2**29, 4 * 16 * 24):
        runs.draw()
        with one_at_a_time(room < 2**29 or here.device == "cuda"):
            runs.one.step()
            worked.zero_()
            runs.many.param_groups[0]["workspace"] = room
            with mock.patch.object(matrices, "newton_schulz", counted):
                runs.many.step()
        runs.same()
        total = worked.to(here.device)
        dist.all_reduce(total)
        assert total == expected, (total, expected)
    fails = here.rank == 0
    known = refused(ArithmeticError, "this rank") if fails else nullcontext()
    with mock.patch.object(matrices, "newton_schulz", counted), known:
        runs.many.step()
    assert any(p.to_local().isnan().any() for p in runs.parts)
    cls, error = optgen.compile(factors, plan="fp32"), mock.Mock(side_effect=ArithmeticError("on this rank"))
    runs = Runs(here, cls, pieces[:1], plan="fp32")
    runs.draw()
    with mock.patch.object(sys.modules[cls.__module__], "inverse_root", error), suppress(ArithmeticError):
        runs.many.step()
    assert runs.many.state[runs.parts[0]]["left"].to_local().isnan().all()


@case(2, further=(3, 4))
def whole_matrices_have_one_worker(here: Here) -> None:
    """Each rank works on its share of those that all hold, with the bits of working on all; a checkpoint is whole.

    Where ranks differ in a gradient, or to begin with, all of them raise, and nothing has changed.
    """
    shapes = [(64, 96)] * 11 + [(96, 64), (12, 32, 24), (72, 4)]
    pieces = [Piece(here.values(*shape, dtype=torch.bfloat16)) for shape in shapes]
    pieces.append(Piece(here.values(64, 48, dtype=torch.bfloat16), here.mesh(here.world), [Replicate()]))
    function, worked = matrices.newton_schulz, torch.zeros(())

    def counted(x: Tensor, *given: float) -> Tensor:
        m, n = sorted(x.shape[-2:])
        worked.add_((len(x) if x.ndim == 3 else 1) * m * m * (4 * n + 2 * m))
        return function(x, *given)

    def step(opt: Any) -> float:
        worked.zero_()
        with mock.patch.object(matrices, "newton_schulz", counted):
            opt.step()
        return worked.item()

    rules = [(optim.Muon, "int8_split24"), (optim.SOAP, "int8_split24"), (optim.Shampoo, "fp32")]
    for cls, plan in rules[: 3 if here.world == 2 else 2]:
        more = {"blocks": {"numel < 300": (40, 24, 8)}} if cls is optim.Muon else {}
        runs = Runs(here, cls, pieces, plan=plan, **more)
        more |= {"lr": 1e-2, "plan": plan, "backend": here.backend, "replicas": dist.group.WORLD}
        runs.many = cls(runs.parts, **more)
        for _ in range(3):
            runs.draw()
            with one_at_a_time(True):
                alone, shared = step(runs.one), step(runs.many)
            runs.same()
            assert shared <= 1.1 * alone / here.world, (shared, alone)
        _, opt = runs.another(runs.many.state_dict(), runs.parts)  # without `replicas`
        for p, q in zip(runs.alone, opt.param_groups[0]["params"], strict=True):
            alike_states(runs.one, p, opt, q, "a loaded state")
    for k, what in enumerate(("gradient", "gradient", "weight")):
        runs.draw()
        if here.rank == 1 and k < 2:
            runs.parts[0].grad = runs.parts[0].grad * 2 if k else None
        runs.parts[0].data.mul_(1 + here.rank * (k == 2))
        runs.many.load_state_dict(runs.many.state_dict())  # what is there is compared anew
        before = [whole(p) for p in runs.parts]
        with refused(ValueError, "parameter 0", f"its {what}", "without `replicas`"):
            runs.many.step()
        assert all(torch.equal(x, whole(p)) for x, p in zip(before, runs.parts, strict=True))
    with refused(TypeError, "process group"):
        optim.Muon(runs.parts, replicas=here.mesh(here.world))


# -- rules that sum ----------------------------------------------------------------------------------------
def enclosed(here: Here, name: str, plan_name: str, pieces: Sequence[Piece], steps: int = 2) -> None:
    """Each step of each parameter lies where running error analysis says that it may, sums taken in any order; what all
    ranks keep is the same on all of them."""
    spec, plan = spec_of(name), plan_of(plan_name)
    cls = getattr(optim, spec.class_name)
    params = [piece.parameter(True) for piece in pieces]
    opt = cls(params, plan=plan_name, backend=here.backend)
    group = opt.param_groups[0]
    hypers = {h.name: group[h.name] for h in cls.HYPERS}
    hypers |= {f.name: group[f.name] for f in cls.FLAGS if not f.derived}
    for k in range(steps):
        before = [decoded(cls, group, p, opt.state.get(p)) for p in params] if k else [None] * len(params)
        grads = [here.values(*piece.value.shape, dtype=piece.value.dtype) for piece in pieces]
        for p, g, piece in zip(params, grads, pieces, strict=True):
            p.grad = piece.of(g)
        host = [{h: opt.state[p][h] for h in variant_of(cls, group, p).host_names} if k else {} for p in params]
        opt.step()
        for p, g, old, kept in zip(params, grads, before, host, strict=True):
            after = decoded(cls, group, p, opt.state[p])
            for value in after.values():
                everywhere(value)
            if old is None or here.rank:
                continue
            flags = spec.flag_values(hypers, tuple(p.shape))
            variant = variant_of(cls, group, p)
            rec = targets.recurrences_of(spec, tuple(sorted(flags.items())))
            dtype = dtypes.FROM_TORCH[str(p.dtype).removeprefix("torch.")]
            storage = plan.storage(spec.present(flags), dtype, variant.small, rec)
            values = Values.decoded(old, kept, k, FAST)
            inside = enclose(spec, storage, values, g, hypers, kept=after)
            report = compare(after, inside, oracle(spec, old, g, k, kept, hypers))
            assert report.ok, (name, plan_name, list(p.shape), p.placements, report)
            assert report.claimed > 0.9, (name, report)


def variant_of(cls: Any, group: dict[str, Any], p: Tensor) -> Any:
    return checkpoint.select(cls, group, p)[2]


def decoded(cls: Any, group: dict[str, Any], p: Tensor, entry: dict[str, Any]) -> dict[str, Tensor]:
    """The fp32 weight under "p" and the fp32 states, whole."""
    _, plan, variant = checkpoint.select(cls, group, p)
    made = sharded_states.decode(plan, variant, p, entry, ("p", *variant.states))
    return {name: whole(value) for name, value in made.items()}


@case(2)
def rows_and_columns_of_formats(here: Here) -> None:
    """Statistics that a format keeps are those of the whole tensor: maxima bit for bit, sums where eager torch has all
    of it; dense states become what they are on one rank."""
    mesh = here.mesh(here.world)
    for plan, backend in (("lpmm4", here.backend), ("int4_factored_split24", "reference")):
        pieces = rows(here, mesh, [(97, 130), (3, 1500), (1, 5000)], torch.bfloat16)
        if plan == "lpmm4":
            pieces += rows(here, mesh, [(7, 3, 16, 16)], torch.bfloat16)
            pieces.append(Piece(here.values(7, 2 * here.world, 16, 16, dtype=torch.bfloat16), mesh, [Shard(1)]))
        pieces.append(Piece(here.values(70, 128 * here.world, dtype=torch.bfloat16), mesh, [Shard(1)]))
        runs = Runs(here, optim.AdamW, pieces, plan=plan, backend=backend)
        runs.step(3)
        # Dense states, whole or in parts, are encoded as on one rank.
        alone, one = runs.another(runs.one.dense_state_dict(), runs.alone)
        for dense in (runs.one.dense_state_dict(), runs.many.dense_state_dict()):
            parts, many = runs.another(dense, runs.parts)
            for p, q in zip(alone, parts, strict=True):
                alike_states(one, p, many, q, f"{list(p.shape)} under {plan}")


SUMMING = (
    "came", "adafactor", "lamb", "stable_adamw", "sm3", "lars", "novograd", "fromage", "cautious_adamw", "adam_mini"
)  # fmt: skip


@case(2, 4)
def sums_over_rows_and_columns(here: Here) -> None:
    """Statistics are those of the whole tensor: uneven parts, ranks without rows, columns cut, stacks of matrices, both
    dimensions cut; replicas are not counted twice."""
    mesh = here.mesh(here.world)
    plans = [("fp32", name) for name in SUMMING] if here.world == 2 else []
    for plan, name in (*plans, *(("int8_split24", name) for name in ("came", "lamb", "sm3"))):
        dtype = torch.float32 if plan == "fp32" else torch.bfloat16
        pieces = rows(here, mesh, [(97, 130), (3, 1500), (5, 3, 16, 16)][here.world // 4 :], dtype)
        pieces.append(Piece(here.values(70, 64 * here.world, dtype=dtype), mesh, [Shard(1)]))
        enclosed(here, name, plan, [*pieces, *over_two(here, 40, 256)])


@case(2, further=(4,))
def limited_norms(here: Here) -> None:
    """Compare Fira's: docs/scaling.md has the roundings of one step, and those that each one in a row adds."""
    pieces = rows(here, here.mesh(here.world), [(97, 130), (64, 96)], torch.float32)
    runs = Runs(here, optim.Fira, pieces, plan="fp32", rank=8)
    for k in range(4):
        runs.give(lambda piece, size=k + 1: size * here.values(*piece.value.shape))
        with one_at_a_time(True):
            runs.one.step()
            runs.many.step()
        for p, q in zip(runs.alone, runs.parts, strict=True):
            norm, found = runs.one.state[p]["scaling_grad"], runs.many.state[q]["scaling_grad"]
            everywhere(whole(found))
            off = (whole(found).double() - norm.double()).abs()
            assert (off <= (83 + here.world / 2 + 8 * k) * 2.0**-24 * norm).all(), (k, off, norm)


@case(2, further=(4,))
def sums_beside_functions_of_matrices(here: Here) -> None:
    """Shampoo's norms and KL-Shampoo's means of columns are within their roundings, sums in any order
    (docs/scaling.md); everything else of a step, and stacks, have the bits of one rank."""
    pieces = rows(here, here.mesh(here.world), [(17, 30), (70, 64), (5, 16, 24)], torch.float32)
    for cls, summed in ((optim.Shampoo, "p"), (optim.KLShampoo, "eigen_right")):
        runs = Runs(here, cls, pieces, plan="fp32", precondition_frequency=2)
        group = runs.one.param_groups[0]
        for k in range(4):
            before = [kept(p, runs.one) for p in runs.alone]
            runs.draw()
            with one_at_a_time(True):
                runs.one.step()
                runs.many.step()
            for p, q, old, piece in zip(runs.alone, runs.parts, before, pieces, strict=True):
                one, many = kept(p, runs.one), kept(q, runs.many)
                sums = k > 0 and piece.value.ndim == 2  # first steps are Adam's, or move nothing
                for name, value in one.items():
                    if not sums or name != summed:
                        alike(value, many[name], f"{name} of {list(p.shape)} at step {k}")
                if sums:
                    new, was = one[summed].double(), old[summed].double()
                    if summed == "p":  # lr times the factor times the update: two norms, their quotient, two products
                        moved = new - was * (1 - group["lr"] * group["weight_decay"])
                        allowed = (2 * (83 + here.world / 2) + 6) * moved.abs() + 2 * new.abs()
                    else:  # e + (1 - beta) (mean - e)
                        gain = 1 - group["betas"][1]
                        mean, e = was + (new - was) / gain, was
                        allowed = gain * (2 * (len(p) + here.world) * mean + 6 * (mean - e).abs()) + 2 * new.abs()
                    off = (whole(many[summed]).double() - new).abs()
                    assert (off <= 2.0**-24 * allowed).all(), (cls, k, list(p.shape), (off / allowed).max() * 2.0**24)
            for p, q, piece in zip(runs.alone, runs.parts, pieces, strict=True):
                with torch.no_grad():
                    q.copy_(piece.of(p.detach()))
            runs.many.load_state_dict(runs.one.state_dict())


def kept(p: Tensor, opt: Any) -> dict[str, Tensor]:
    """A copy of the weight, under "p", and of the states that are tensors."""
    values = {"p": p.detach(), **opt.state.get(p, {})}
    return {k: v.clone() for k, v in values.items() if isinstance(v, Tensor)}


@case(2, further=(4,))
def blocks_of_rows(here: Here) -> None:
    """Parts of whole blocks take the steps of one rank, bit for bit; a block that two ranks share is refused."""
    mesh, cls = here.mesh(here.world), optim.AdamMini
    blocks = {"numel > 7000": 8, "numel <= 7000": 4}
    for plan, dtype in (("fp32", torch.float32), ("int8_split24", torch.bfloat16)):
        pieces = rows(here, mesh, [(96, 83), (8, 5, 3, 3)], dtype)
        runs = Runs(here, cls, pieces, plan=plan, blocks=blocks)
        runs.step(2)
        runs.many.load_state_dict(runs.one.state_dict())
        runs.step()
    for shape, dim, word in (((36, 8), 0, "multiple of the"), ((48, 80), 1, "dimension 0")):
        piece = Piece(here.values(*shape), mesh, [Shard(dim)])
        with refused(ValueError, word, "`blocks`"):
            cls([piece.parameter(True)], blocks={"numel > 0": 3})


@case(2, further=(3,))
def views_of_rows(here: Here) -> None:
    """A rank has the views of its rows, by each rule's sweeps; views that need other ranks' rows are refused."""
    mesh = here.mesh(here.world)
    viewed = specs.plans.int8_split24.but("A view.", views=("mxfp8_rows",), name="viewed")
    both = viewed.but("Views.", views=("mxfp8_rows", "mxfp8_columns"), name="both")
    for rule, plan in (("adamw", viewed), ("lamb", viewed), ("adamw", both)):
        cls, columns = optgen.compile(rule, plan), plan is both
        shapes = [(32 * here.world, 128), (192, 96)] if columns else [(97, 128), (64, 96), (1, 64)]
        runs = Runs(here, cls, rows(here, mesh, shapes, torch.bfloat16), plan=plan.name)

        def same_views(change: Callable[[Tensor], object], runs: Runs = runs, columns: bool = columns) -> None:
            for p, q in zip(runs.alone, runs.parts, strict=True):
                with torch.no_grad():
                    change(p)
                    change(q)
                whole, part = runs.one.views(p)["mxfp8_rows"], runs.many.views(q)["mxfp8_rows"]
                for x, y in ((whole.codes, part.codes), (whole.scales, part.scales)):
                    own = sharding.part_of(x.view(torch.uint8), sharding.layout_of(q))
                    assert torch.equal(own, y.view(torch.uint8))
                if columns:
                    whole, part = runs.one.views(p)["mxfp8_columns"], runs.many.views(q)["mxfp8_columns"]
                    for x, y in ((whole.codes, part.codes), (whole.scales, part.scales)):
                        assert torch.equal(x.view(torch.uint8).chunk(here.world, 1)[here.rank], y.view(torch.uint8))

        runs.step()
        same_views(lambda p: p)
        same_views(lambda p: p.mul_(2))
        runs.step()
        same_views(lambda p: p)
    layer = nn.Linear(96, 64)
    layer.weight = runs.parts[1]
    with refused(ValueError, "gather opt.views"):
        runs.many.use_views(layer)
    of_views = ("mxfp8_rows", 1, "dimension 0"), ("fp8", 0, "mxfp8_rows has none"), ("mxfp8_columns", 0, "divides 5")
    for view, dim, word in of_views:
        cls = optgen.compile("adamw", specs.plans.fp32.but("A view.", views=(view,), name=f"fp32_{view}"))
        piece = Piece(here.values(160, 128), mesh, [Shard(dim)])
        q = piece.parameter(True)
        opt = cls([q], backend=here.backend)
        q.grad = piece.of(here.values(160, 128))
        with refused(ValueError, word, "plan without views"):
            opt.step()
        with refused(ValueError, word):
            opt.views(q)


@case(2, further=(3,))
def sums_over_the_model(here: Here) -> None:
    """Sums that fp32 takes without rounding, so that their order is none: bit for bit the run on one rank."""
    mesh = here.mesh(here.world)
    pieces = rows(here, mesh, [(97, 130), (2, 1500), (7,)], torch.float32)
    pieces.append(Piece(here.values(33), None))
    runs = Runs(here, optim.ClippedAdamW, pieces, plan="fp32")
    for _ in range(2):
        runs.give(lambda piece: here.values(*piece.value.shape).sign())
        runs.one.step()
        runs.many.step()
    runs.same()
    params = [piece.parameter(True) for piece in pieces]
    opt = optim.Prodigy(params, plan="fp32", backend=here.backend)
    for _ in range(3):
        for q, piece in zip(params, pieces, strict=True):
            q.grad = piece.of(here.values(*piece.value.shape))
        opt.step()
    for name in ("d", "d_max"):
        found = [sharding.local(opt.state[q][name]) for q in params if name in opt.state[q]]
        for value in found:
            everywhere(value)
            assert torch.equal(value, found[0])


@case(2, further=(3,))
def ranks_wait_for_none_that_does_not_come(here: Here) -> None:
    """A gradient that one rank lacks counts as zeros there; one that all lack leaves the parameter alone."""
    mesh = here.mesh(here.world)
    cases: list[Callable[..., Any]] = [optim.LAMB, optim.Muon]
    if mesh.device_type == "cpu":  # parts that lie there stay there
        cases.append(functools.partial(optim.LAMB, offload=True))
    for cls in cases:
        pieces = rows(here, mesh, [(97, 130), (64, 96), (2, 2500)], torch.float32)
        here_only, zeros = [x.parameter(True) for x in pieces], [x.parameter(True) for x in pieces]
        one, two = (cls(params, plan="fp32", backend=here.backend) for params in (here_only, zeros))
        for _ in range(2):
            for k, (p, q, piece) in enumerate(zip(here_only, zeros, pieces, strict=True)):
                g = piece.of(here.values(*piece.value.shape))
                if k == 1:  # nobody
                    continue
                lacks = k == 0 and here.rank == here.world - 1
                p.grad = None if lacks else g
                q.grad = torch.zeros_like(g) if lacks else g
            one.step()
            two.step()
        for k, (p, q) in enumerate(zip(here_only, zeros, strict=True)):
            assert torch.equal(p.to_local(), q.to_local())
            assert (k == 1) == (p not in one.state), k


@case(2, further=(3,))
def a_rank_without_a_gradient_does_not_step_where_nothing_is_sent(here: Here) -> None:
    """An unused expert under element-wise rules: nothing moves or is counted there; zeros count on all ranks alike."""
    mesh = here.mesh(here.world)
    last = here.rank == here.world - 1
    for cls, plan in ((optim.AdamW, "int8_split24"), (optim.Lion, "fp32"), (optim.RMSprop, "bf16_sr")):
        value = here.values(2, 2500)
        p, q = (Piece(value, mesh, [Shard(0)]).parameter(True) for _ in range(2))
        lacking, zeros = (cls([x], plan=plan, backend=here.backend) for x in (p, q))
        for k in range(3):
            g = Piece(value, mesh, [Shard(0)]).of(here.values(*value.shape))
            p.grad = None if last and k == 0 else g
            q.grad = torch.zeros_like(g) if last and k == 0 else g
            before = p.to_local().clone()
            lacking.step()
            zeros.step()
            assert torch.equal(before, p.to_local()) == (last and k == 0 or not before.numel())
        assert int(lacking.state[p]["step"]) == (2 if last else 3)
        assert int(zeros.state[q]["step"]) == 3
        assert last or torch.equal(p.to_local(), q.to_local())
    p = Piece(here.values(2 * here.world, 64), mesh, [Shard(0)]).parameter(True)
    lacking = optim.AdamW([p], plan="fp32", backend=here.backend)
    p.grad = None if last else torch.ones_like(p)
    lacking.step()
    with refused(dcp.api.CheckpointException, "invalid fill"):  # made by other ranks alone
        dcp.save(lacking.state_dict(), checkpoint_id=str(here.folder / f"lacking_{here.world}"))


@case(2, kernels=("triton", "cpp"))
def kernels_over_parts(here: Here) -> None:
    """The kernels of the backend alone, over few elements: Triton's interpreter takes its time."""
    mesh = here.mesh(2)
    for plan, shape in (("int8_split24", (3, 128)), ("bf16_sr", (5, 27))):
        pieces = rows(here, mesh, [(5, 66), (1, 70)], torch.bfloat16)
        pieces.append(Piece(here.values(*shape, dtype=torch.bfloat16), mesh, [Shard(1)]))
        Runs(here, optim.AdamW, pieces, plan=plan).step()
    runs = Runs(here, optim.ScheduleFreeAdamW, rows(here, mesh, [(3, 8)], torch.float32), capturable=True)
    for step in (1, 2):  # counted on the device, where the kernels are Triton's
        runs.step()
        assert all(int(entry["step"]) == step for entry in runs.many.state.values())
    pieces = rows(here, mesh, [(5, 66)], torch.bfloat16)
    pieces.append(Piece(here.values(3, 128, dtype=torch.bfloat16), mesh, [Shard(1)]))
    enclosed(here, "came", "int8_split24", pieces)


# -- as their users use them -------------------------------------------------------------------------------
class Model(nn.Module):
    """Two layers of odd sizes, one normalization."""

    def __init__(self, width: int = 130) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, width), nn.LayerNorm(width)
        self.down = nn.Linear(width, 33)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


def built(here: Here, width: int = 130) -> Model:
    torch.manual_seed(SEED)
    return Model(width).to(here.device)


@case(2)
def replicas(here: Here) -> None:
    """DistributedDataParallel: all ranks keep the same bits, also under stochastic rounding, though they see other
    batches; with ZeroRedundancyOptimizer each steps its share of the parameters as one optimizer steps them all."""
    models = [nn.parallel.DistributedDataParallel(built(here)) for _ in range(4)]
    options = {"lr": 1e-2, "backend": here.backend}
    zero = ZeroRedundancyOptimizer(models[0].parameters(), optimizer_class=optim.AdamW, plan="fp32", **options)
    usual = optim.AdamW(models[1].parameters(), plan="fp32", **options)
    coded = optim.AdamW(models[2].named_parameters(), plan="int8", **options)
    shared = optim.Muon(models[3].named_parameters(), plan="int8", replicas=models[3].process_group, **options)
    for _ in range(3):
        x = here.values(2, 16, 64)[here.rank]
        for model, opt in zip(models, (zero, usual, coded, shared), strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    for p, q, r, s in zip(*(model.parameters() for model in models), strict=True):
        alike(q.detach(), p.detach(), "the weight")
        for value in (p, r, *coded.state[r].values(), s, *shared.state[s].values()):
            everywhere(value if isinstance(value, Tensor) else torch.tensor(value))
    assert 0 < len(zero.optim.state) < len(usual.state)


@case(2, 4)
def fully_sharded(here: Here) -> None:
    """fully_shard, alone and with tensor parallelism: the bits of one rank that has the same gradients.  Overrides, and
    modules with fp32 states, are decided on the whole tensor."""
    chosen: dict[Any, str] = {nn.LayerNorm: "bf16_sr", "numel >= 8192": "split32"}  # in all; fewer are here
    for cls, plan, overrides in (
        (optim.AdamW, "int8", None),
        (optim.SOAP, "int8", None),
        (optim.AdamW, "int8_split24", chosen),
    ):
        model = built(here, 128)
        if overrides:
            keep_states_fp32(model.to(torch.bfloat16).down)
        alone = copy.deepcopy(model)
        if here.world == 4:
            mesh = here.mesh(2, 2)
            parallelize_module(
                model,
                mesh["inner"],
                {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
            )
            fully_shard(model, mesh=mesh["outer"])
        else:
            fully_shard(model.up)
            fully_shard(model)
        options = {"lr": 1e-2, "plan": plan, "backend": here.backend}
        opt, other = (cls(m.named_parameters(), overrides=overrides, module=m, **options) for m in (model, alone))
        assert opt.plans() == other.plans()
        assert not overrides or {"split32", "bf16_sr", "int8_split24 (fp32 states)"} <= {*opt.plans().values()}
        for k in range(3):
            if k == 1 and here.device == "cpu":
                opt._offload.resident = ()
            if k == 1:  # and begins anew in one go
                opt.offload_states()
                opt.reload_states()
                opt.load_state_dict(opt.state_dict(weights_only=True))
                for one in (opt, other):
                    one.reset_states(keep=())
            opt.zero_grad()
            model(here.values(16, 64, dtype=alone.up.weight.dtype)).float().square().mean().backward()
            for (_, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                q.grad = whole(p.grad)
            with one_at_a_time(True):
                opt.step()
                other.step()
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                alike(q.detach(), p.detach(), name)
                alike_states(other, q, opt, p, name)
                assert all(isinstance(x, DTensor) for x in opt.state[p].values() if isinstance(x, Tensor))


@case(2, further=(3,))
def gradients_released(here: Here) -> None:
    """Within the backward of fully_shard, clipped, of micro-batches, of parts that stay on the host, by sums of the
    step before, and of replicas in the place of shards: as in ordinary steps."""

    def sharded(dtype: torch.dtype, policy: OffloadPolicy, mesh: DeviceMesh | None) -> Model:
        model = built(here).to(dtype)
        fully_shard(model.up, offload_policy=policy, mesh=mesh)
        fully_shard(model, offload_policy=policy, mesh=mesh)
        return model

    # Kernels of other backends may round otherwise: only where both models are stepped by the host.
    on_host = CPUOffloadPolicy(pin_memory=False) if here.device == "cpu" else OffloadPolicy()
    bf16, fp32 = torch.bfloat16, torch.float32
    cases: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [("AdamW", "int8_split24", bf16, {})]
    replicated, lagging = {"mesh": here.mesh(here.world, 1)}, {"sums": "previous"}
    cases += [("LAMB", "int8_split24", bf16, replicated), ("DAdaptAdam", "int8", fp32, lagging | replicated)]
    if here.world == 2:  # the order of a sum over more ranks depends on what is sent beside it
        in_fp32 = {"accumulate": 2, "accumulator": accumulator("fp32"), "clip": 1e-3}
        cases += [
            ("AdamW", "int8", fp32, in_fp32),
            ("LAMB", "int8_split24", bf16, {"accumulate": 2}),
            ("CAME", "fp32", fp32, {}),
            ("Muon", "int8_split24", bf16, {}),
            ("SOAP", "int8_split24", bf16, {}),
            ("DAdaptAdam", "int8_split24", bf16, {"accumulate": 2} | lagging),
        ]
    for name, plan, dtype, options in cases:
        mesh, waiting = options.pop("mesh", None), "sums" in options  # all wait at the first step, then the smallest
        policy = on_host if name == "LAMB" and mesh is None else OffloadPolicy()
        model, other = sharded(dtype, policy, mesh), sharded(dtype, OffloadPolicy(), mesh)
        ours, theirs = (
            [(key, p) for key, p in m.named_parameters() if p.ndim > 1 or name != "CAME"] for m in (model, other)
        )
        opt, usual = (getattr(optim, name)(found, plan=plan, backend=here.backend) for found in (ours, theirs))
        handle = opt.release_gradients(model, **options)
        micro = options.get("accumulate", 1)
        for step in range(2):
            for k in range(micro):
                x = here.values(here.world, 16, 64, dtype=dtype)[here.rank]  # another batch on each rank
                for m in (model, other):
                    m(x).float().square().mean().backward()
                waits = (k + 1 < micro and "accumulator" not in options) or (waiting and not step)
                count = sum(p.grad is not None for _, p in ours)
                assert count == (len(ours) if waits else waiting), (name, k)
            if "clip" in options:
                for _, p in theirs:
                    nn.utils.clip_grad_norm_([p], options["clip"])
            for m, o in ((model, opt), (other, usual)):
                o.step()
                m.zero_grad()
        for (key, p), (_, q) in zip(ours, theirs, strict=True):
            made, wanted = ({"p": x.detach(), **o.state[x]} for x, o in ((p, opt), (q, usual)))
            assert made["step"] == 2 and made.keys() == wanted.keys(), (key, name)
            for field_name, value in kept(q, usual).items():
                assert torch.equal(sharding.local(value), sharding.local(made[field_name])), (field_name, key, name)
        handle.remove()


@case(2)
def full_weights_come_and_go(here: Here) -> None:
    """load_master_state_dict before the first step and after it, and rows that are scaled between steps."""
    mesh, narrow = here.mesh(2), {"dtype": torch.bfloat16}
    # Rows in blocks, and a vector whose halves cut them: its states are on all ranks.
    exact = {f"p{k}": here.values(*shape) for k, shape in enumerate([(97, 130), (4160,), (7,)])}
    for early in (True, False):
        pieces = [Piece(torch.zeros_like(value, **narrow), mesh, [Shard(0)]) for value in exact.values()]
        runs = Runs(here, optim.AdamW, pieces, plan="int8_split24")
        if not early:
            runs.step()
        sides = [(nn.ParameterDict(zip(exact, x, strict=True)), opt) for x, opt in runs.sides()]
        for module, opt in sides:
            opt.load_master_state_dict(module, exact)
        for waits in (early, False):
            full, cut = (opt.master_state_dict(module) for module, opt in sides)
            for name, value in full.items():
                if waits:  # all 32 bits, until a state has taken them; then 24 are kept
                    assert ((value - whole(cut[name])).abs() <= 2.0**-16 * value.abs()).all(), name
                else:
                    alike(value, cut[name], f"weight {name}")
            runs.step()
            for module, opt in sides:
                for p in module.values():
                    opt.scale_rows(p, torch.linspace(0.5, 1.5, p.shape[0]))


@case(2)
def flattened(here: Here) -> None:
    """The pieces that FullyShardedDataParallel makes of parameters are refused."""
    device = torch.device("cpu") if here.device == "cpu" else torch.cuda.current_device()
    model = FullyShardedDataParallel(built(here), use_orig_params=True, device_id=device).requires_grad_(False)
    opt = optim.AdamW(model.parameters(), plan="fp32", backend=here.backend)  # which trains nothing yet
    words = ("was flattened and cut by FullyShardedDataParallel", "fully_shard")
    for p in model.requires_grad_().parameters():
        p.grad = torch.ones_like(p)
    with refused(ValueError, *words):
        opt.step()
    with refused(ValueError, *words):
        optim.AdamW(model.parameters(), plan="fp32", backend=here.backend)


SAVED = (
    ("AdamW", "int8_split24", True),
    ("AdamW", "bf16_sr", False),
    ("Muon", "int8_split24", False),
    ("factors", "int8_split24", True),
    ("GaLore", "int8_split24", False),
)


def trained(here: Here, k: int) -> tuple[Runs, Path, StateDictOptions]:
    """Two steps on any number of ranks, the same on all; where they are saved."""
    name, plan, flat = SAVED[k]
    here.restart()
    cls = optgen.compile(factors, plan=plan) if name == "factors" else getattr(optim, name)
    pieces = rows(here, here.mesh(here.world), FACTORS if name == "factors" else UNEVEN, torch.bfloat16)
    runs = Runs(here, cls, pieces, plan=plan)
    with one_at_a_time(True):
        runs.step(2)
    return runs, here.folder / f"{name}_{plan}", StateDictOptions(flatten_optimizer_state_dict=flat)


def contents(params: Sequence[nn.Parameter], opt: Any, options: StateDictOptions) -> tuple[nn.Module, dict[str, Any]]:
    """A module of the parameters, and what a folder has of both."""
    module = nn.ParameterDict({f"p{k}": p for k, p in enumerate(params)})
    return module, {"weights": module.state_dict(), "opt": get_optimizer_state_dict(module, opt, options=options)}


@case(2)
def saves_for_other_ranks(here: Here) -> None:
    """torch.distributed.checkpoint, waiting for it and not."""
    for k in range(len(SAVED)):
        runs, folder, options = trained(here, k)
        _, saved = contents(runs.parts, runs.many, options)
        if k:
            dcp.async_save(saved, checkpoint_id=str(folder)).result()
        else:
            dcp.save(saved, checkpoint_id=str(folder))


@case(4, 1, further=(3,))
def loads_what_other_ranks_saved(here: Here) -> None:
    """Loaded on another number of ranks, training goes on bit for bit."""
    there = all((here.folder / f"{name}_{plan}" / ".metadata").exists() for name, plan, _ in SAVED)
    dist.barrier()
    if not there:  # no run before this one
        saves_for_other_ranks(here)
        dist.barrier()
    for k in range(len(SAVED)):
        runs, folder, options = trained(here, k)
        runs.parts = [nn.Parameter(torch.zeros_like(p)) for p in runs.parts]
        runs.many = type(runs.one)(runs.parts, lr=0.5, plan=SAVED[k][1], backend=here.backend)
        module, found = contents(runs.parts, runs.many, options)
        assert all(whole(p).eq(0).all() for p in runs.parts)  # states are made by a step that changes nothing
        dcp.load(found, checkpoint_id=str(folder))
        module.load_state_dict(found["weights"])
        set_optimizer_state_dict(module, runs.many, found["opt"], options=options)
        with one_at_a_time(True):
            runs.step(2)


@case(2)
def loads_whole_and_dense(here: Here) -> None:
    """An optimizer's own state dict: of DTensors, of whole tensors, and torch.optim's."""
    mesh = here.mesh(here.world)
    pieces = rows(here, mesh, [(97, 130), (4160,), (7,)], torch.bfloat16)
    rules = (optgen.compile(factors, plan="int8_split24"), optim.Kron, optim.GaLore, optim.AdamW)
    for cls in rules:
        runs = Runs(here, cls, pieces, plan="int8_split24")
        runs.step()
        for saved in (runs.many.state_dict(), runs.one.state_dict()):
            params, other = runs.another(saved, runs.parts)
            for p, q in zip(runs.alone, params, strict=True):
                alike_states(runs.one, p, other, q, "loaded")
        for number, (alone, parts) in enumerate(zip(runs.one.full_weights(), runs.many.full_weights(), strict=True)):
            alike(alone, parts, f"weight {number}")
        dense, cut = runs.one.dense_state_dict(), runs.many.dense_state_dict()
        for number, entry in dense["state"].items():
            for key, value in entry.items():
                alike(value, cut["state"][number][key], key)
        params, other = runs.another(dense, runs.parts)
        whole_params, one = runs.another(dense, runs.alone)
        for p, q in zip(whole_params, params, strict=True):
            alike_states(one, p, other, q, "dense")
    with refused(ValueError, "exp_avg", "nothing was loaded"):
        bad = runs.one.state_dict()
        bad["state"][0] = {**bad["state"][0], "exp_avg_codes": torch.zeros(96, 130, dtype=torch.uint8)}
        other.load_state_dict(bad)
    bad = runs.many.dense_state_dict()
    bad["state"][0]["exp_avg"].to_local()[0, 0] = torch.nan
    for saved, entry, said in (
        (runs.many.state_dict(), {"step": -1}, "step: expected"),
        (runs.many.dense_state_dict(), bad["state"][0], "exp_avg: expected numbers, 1 of"),
    ):
        if here.rank == 1:  # what one rank finds, none loads
            saved["state"][0] = {**saved["state"][0], **entry}
        with refused(ValueError, said if here.rank == 1 else "another rank found", "nothing was loaded"):
            other.load_state_dict(saved)
    if here.rank == 0:  # alone: no rank is asked for anything
        with refused(TypeError, "torch.distributed.checkpoint"):
            files.save_checkpoint("never.pt", other)
    # Saved by rows, loaded by columns: the states are laid anew.
    value = here.values(64, 256, dtype=torch.bfloat16)
    for cls in rules:
        by_rows, by_columns = (Runs(here, cls, [Piece(value, mesh, [Shard(d)])], plan="int8_split24") for d in (0, 1))
        by_rows.step()
        by_columns.many.load_state_dict(by_rows.many.state_dict())
        alike_states(by_rows.one, by_rows.alone[0], by_columns.many, by_columns.parts[0], "other parts")


@case(2)
def evaluates(here: Here) -> None:
    """Averages for evaluation, and checkpoints that are taken then."""
    mesh = here.mesh(here.world)
    runs, *again = [
        Runs(here, optim.ScheduleFreeAdamW, rows(here, mesh, [(97, 130), (7,)], torch.bfloat16), plan="int8_split24")
        for _ in range(3)
    ]
    runs.step(2)
    for opt in (runs.one, runs.many):
        opt.eval()
    for p, q in zip(runs.alone, runs.parts, strict=True):
        alike(p.detach(), q.detach(), "the average")
    for p, q in zip(runs.one.full_weights(), runs.many.full_weights(), strict=True):
        alike(p, q, "the average in fp32")
    again[0].many.load_state_dict(runs.many.state_dict())
    again[1].many.load_state_dict(runs.many.dense_state_dict())
    for opt in (runs.one, runs.many, *(other.many for other in again)):
        opt.train()
    runs.same()
    for other in again:
        for p, q in zip(runs.alone, other.parts, strict=True):
            alike(p.detach(), q.detach(), "the weight of training")


@case(2)
def measures_parts(here: Here) -> None:
    """Squares of norms add up over ranks; fp32 sums of runs of 256, twice rounded: within 2 * 300 * 2^-24 < 2^-14."""
    runs = Runs(here, optim.AdamW, rows(here, here.mesh(2), [(97, 130), (1, 5000)], torch.bfloat16))
    runs.step()
    found: list[dict[str, Any]] = []
    for opt in (runs.one, runs.many):
        opt.watch(1, to=lambda step, tensors: found.append(tensors), sample=float("inf"))
    runs.step()
    alone, mine = found
    for name, row in alone.items():
        part = mine.get(name, {"elements": 0})
        for key in ("elements", "weight_norm", "gradient_norm", "update_norm"):
            total = torch.tensor(float(part.get(key, 0)) ** (1 if key == "elements" else 2), dtype=torch.float64)
            dist.all_reduce(total)
            wanted = row[key] ** (1 if key == "elements" else 2)
            assert abs(total.item() - wanted) <= 2**-14 * wanted, (name, key, total, wanted)


@case(2)
def refuses_what_it_cannot_do(here: Here) -> None:
    """With what was found and what to do; nothing has changed."""
    mesh = here.mesh(2)
    with refused(ValueError, "columns [0, 20)", "multiple of 2 x 64", "dimension 0"):
        Runs(here, optim.AdamW, [Piece(here.values(128, 40), mesh, [Shard(1)])], plan="int8")
    summand = nn.Parameter(DTensor.from_local(here.values(8, 8), mesh, [Partial()], run_check=False))
    with refused(ValueError, "summand"):
        optim.AdamW([summand], plan="fp32")
    stack = Piece(here.values(4, 64, 128, dtype=torch.bfloat16), mesh, [Shard(1)])
    with refused(ValueError, "dimension 0"):
        Runs(here, optim.CAME, [stack], plan="int8_split24")
    p = nn.Parameter(distribute_tensor(here.values(64, 64), mesh, [Shard(0)]))
    q = nn.Parameter(p.detach().clone())
    opt = optim.AdamW([p, q], plan="fp32", backend=here.backend)
    before = p.to_local().clone()
    # A gradient that lies otherwise is brought to where its parameter lies.
    g = here.values(64, 64)
    p.grad, q.grad = distribute_tensor(g, mesh, [Shard(1)]), distribute_tensor(g, mesh, [Shard(0)])
    opt.step()
    assert not torch.equal(before, p.to_local()) and torch.equal(p.to_local(), q.to_local())
    # A model that is wrapped anew has other parts: the states do not fit them.
    again = nn.Parameter(distribute_tensor(whole(p), mesh, [Shard(1)]))
    opt.state[again] = opt.state.pop(p)
    opt.param_groups[0]["params"][0] = again
    again.grad = distribute_tensor(g, mesh, [Shard(1)])
    kept = again.to_local().clone()
    with refused(RuntimeError, "exp_avg"):
        opt.step()
    assert torch.equal(kept, again.to_local())


# -- running -----------------------------------------------------------------------------------------------
def run_cases(here: Here, arguments: argparse.Namespace) -> None:
    """Run every chosen case for so many ranks."""
    for name, backend in chosen(here.world, arguments.of, arguments.only, arguments.kernels):
        here.backend = backend
        here.restart()
        CASES[name].check(here)
        dist.barrier()
        if here.rank == 0:
            print(f"ok {here.world} {name} {backend}", flush=True)


def start(rank: int, world: int, arguments: argparse.Namespace, init: str, local: int) -> int:
    """One rank; the exit code."""
    torch.set_num_threads(1)
    device = arguments.device
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic products need
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=arguments.timeout)
    )
    here = Here(rank, world, device, "", Path(arguments.folder))
    try:
        with unoptimized():  # compiled faster, the same for all runs
            run_cases(here, arguments)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    dist.destroy_process_group()
    return 0


@functools.cache
def before_ranks() -> None:
    """Compile what cases share, once for all ranks of all runs."""
    accumulator("fp32")
    for spec, names in ((factors, ["fp32", "int8_split24"]), (sketched, ["fp32"]), ("gsam(adamw)", ["fp32"])):
        for plan in names:
            optgen.compile(spec, plan=plan)
    plans.load(optim.SOAP, "int8")


def fork(world: int, arguments: argparse.Namespace) -> int:
    """Start so many processes, end all when one fails, and return the exit code."""
    before_ranks()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = 1
                gc.freeze()  # collections copy none of the pages that all ranks share
                try:
                    code = start(rank, world, arguments, f"file://{folder}/store", rank)
                finally:
                    os._exit(code)
            children.append(child)
        failed = 0
        while children:
            child, status = os.wait()
            children.remove(child)
            if status and not failed:
                failed = 1
                for other in children:
                    os.kill(other, 15)
        return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of cases")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="runs of so many processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--of", choices=("daily", "further", "all"), default="all", help="of which tests")
    parser.add_argument("--kernels", help="the optimizers' `backend`; default: auto, on CPUs those of each case")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for another one")
    parser.add_argument("--folder", help="for checkpoints, shared by all ranks and runs; default: a temporary one")
    arguments = parser.parse_args()
    arguments.kernels = arguments.kernels or ("auto" if arguments.device == "cuda" else "")
    unknown = {*arguments.only} - CASES.keys()
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))} (there are: {', '.join(CASES)})")
    worlds = [int(os.environ["WORLD_SIZE"])] if "RANK" in os.environ else arguments.ranks
    if not any(chosen(world, arguments.of, arguments.only) for world in worlds):
        parser.error(f"none of the cases is for {worlds} ranks")
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken()
    if "RANK" in os.environ:
        arguments.folder = arguments.folder or tempfile.gettempdir()
        rank, world, local = (int(os.environ[x]) for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return start(rank, world, arguments, "env://", local)
    if arguments.device == "cuda":
        parser.error("start it with torchrun where there are GPUs, or say --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = arguments.folder or folder
        return max(fork(world, arguments) for world in worlds)


if __name__ == "__main__":
    sys.exit(main())
