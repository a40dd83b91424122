"""Parameters of several ranks: processes on this machine, the geometry that all count on, and what one rank does."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from docs.tools import scaling
from optgen import optim
from optgen.driver.compile import compile as compiled
from optgen.lang import flag, hyper, norm, optimizer
from optgen.optim import LAMB, AdamW, Muon
from optgen.runtime.cpu import native
from optgen.runtime.layout import messages, sharding
from optgen.runtime.options import entries
from optgen.runtime.records import Field
from optgen.runtime.reference.matrices import FLOPS
from optgen.runtime.step import agreement
from optgen.runtime.work import workers
from tests import ranks
from tests.training import bits, has_plan, keep_no_plan, planned_steps

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("of", ["daily", pytest.param("further", marks=pytest.mark.full)])
def test_every_case_on_one_to_four_ranks(of: str, interpreter: dict[str, str]) -> None:
    """In processes of this machine."""
    command = [sys.executable, "-m", "tests.ranks", "--device", "cpu", "--of", of]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=interpreter)
    expected = [f"ok {world} {' '.join(case)}" for world in ranks.RANKS for case in ranks.chosen(world, of)]
    passed = [line for line in found.stdout.splitlines() if line.startswith("ok ")]
    assert (found.returncode, passed) == (0, expected), found.stdout + found.stderr[-8000:]


MESHES = [
    ((4,), [(Shard(0),), (Shard(1),), (Replicate(),)]),
    (
        (2, 3),
        [
            (Shard(0), Shard(0)),
            (Shard(0), Shard(1)),
            (Replicate(), Shard(0)),
            (_StridedShard(0, split_factor=3), Shard(0)),
        ],
    ),
]


@pytest.mark.parametrize("shape", [(12, 6), (24, 7), (5, 6), (1, 1), (0, 3), (7, 0), (13, 4, 3)])
def test_parts_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """Size and first index of each rank's part, as DTensor has them."""
    for mesh, kinds in MESHES:
        for placements in kinds:
            cuts = tuple(None if p.is_replicate() else (p.dim, int(getattr(p, "split_factor", 1))) for p in placements)
            for coordinate in itertools.product(*map(range, mesh)):
                size, first = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
                where = (torch.Size(shape), mesh, coordinate, cuts)
                found = sharding.region(*where)
                assert tuple(b - a for a, b in found) == tuple(size)
                if all(size):
                    assert tuple(a for a, _ in found) == tuple(first)


@contextmanager
def one_of(world: int, rank: int = 0) -> Iterator[None]:
    """One rank of many; the others neither send nor receive."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_what_a_step_on_1024_ranks_keeps_and_sends() -> None:
    """docs/scaling.md says what the tool counts."""
    with one_of(1024):
        table = scaling.table(1024)
    assert len(table) == 2 + len(scaling.RULES)
    assert "\n".join(table) in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_states_of_parts_on_the_host_stay_there_over_a_mesh_of_gpus() -> None:
    """As fully_shard's CPUOffloadPolicy keeps parameters; no GPU is asked for anything."""
    with one_of(2):
        of = sharding.Layout(DeviceMesh("cuda", [0, 1], _init_backend=False), (Shard(0),), torch.Size((128, 64)))
        p = nn.Parameter(sharding.wrapped(torch.ones(64, 64, dtype=torch.bfloat16), of))
        opt = AdamW([("up", p)], plan="int8_split24")
        p.grad = sharding.wrapped(torch.ones(64, 64, dtype=torch.bfloat16), of)
        opt.step()
        opt._offload.resident = ()
        opt.offload_states()
        opt.reload_states()
        assert {x.device.type for x in opt.state[p].values() if isinstance(x, DTensor)} == {"cpu"}
        assert torch.isfinite(opt.full_weights()[0].to_local()).all()


# -- the short way through a step over DTensors ---------------------------------------------------------------------
def part(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, of: Placement = Shard(0)) -> DTensor:
    """This rank's part of a tensor on two ranks."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return DTensor.from_local(value, init_device_mesh("cpu", (2,)), [of])


def give(opt: Any, seed: int) -> None:
    for k, p in enumerate(opt.param_groups[0]["params"]):
        own = {"of": p.placements[0]} if isinstance(p, DTensor) else {}
        g = part(*sharding.local(p).shape, dtype=p.dtype, seed=100 * seed + k, **own)
        p.grad = g if own else g.to_local()


def two_steps(short: bool) -> Any:
    """An optimizer that takes the short way from now on, or never."""
    params = [nn.Parameter(part(*shape, seed=k)) for k, shape in enumerate([(8, 640), (5, 130), (0, 7), (1,)])]
    params += [nn.Parameter(part(8, 70, of=Replicate())), nn.Parameter(part(8, 70).to_local())]  # in one bucket
    opt = AdamW(params, plan="int8_split24", backend="cpp", lr=1e-2)
    if not short:
        keep_no_plan(opt)
    for step in range(2):
        give(opt, step)
        opt.step()
    return opt


CHANGES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "nothing": lambda p, entry: None,
    "gradient elsewhere": lambda p, entry: setattr(p, "grad", part(8, 640, seed=7)),
    "gradient placed otherwise": lambda p, entry: setattr(p, "grad", part(16, 640, seed=8, of=Replicate())),
    "part moved": lambda p, entry: setattr(p, "_local_tensor", p._local_tensor.clone()),
    "part of a state moved": lambda p, entry: setattr(
        entry["exp_avg_codes"], "_local_tensor", entry["exp_avg_codes"].to_local() ^ 1
    ),
    "step set": lambda p, entry: entry.update(step=40),
}
NO_COMPILER = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@NO_COMPILER
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_between_steps_over_parts_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = planned_steps(monkeypatch)
    found = []
    with one_of(2):
        for short in (True, False):
            opt = two_steps(short)
            params = opt.param_groups[0]["params"]
            p = params[0]
            assert has_plan(opt) is short
            CHANGES[change](p, opt.state[p])
            taken.clear()
            opt.step()
            assert not short or taken == [change in ("nothing", "gradient elsewhere", "step set")]  # p is a bucket
            version = p._version
            for seed in (5, 6):
                give(opt, seed)
                opt.step()
            assert p._version == version + 2
            assert not short or taken[-1]
            kept = [sharding.local(x) if isinstance(x, Tensor) else x for q in params for x in opt.state[q].values()]
            found.append(bits([*(sharding.local(q) for q in params), *kept]))
    assert found[0] == found[1]


@NO_COMPILER
@pytest.mark.parametrize(("cls", "shape"), [(LAMB, (8, 64)), (AdamW, (4160 // 2,))])
def test_no_rank_takes_the_short_way_while_others_may_wait(cls: Any, shape: tuple[int, ...]) -> None:
    """At a rule that sums over ranks, and at one whose vector all ranks have to step whole."""
    with one_of(2):
        params = [nn.Parameter(part(8, 640)), nn.Parameter(part(*shape))]
        opt = cls(params, plan="int8_split24", backend="cpp")
        for frozen in (True, False):
            params[1].requires_grad_(not frozen)
            params[1].grad = None
            for step in range(3):
                params[0].grad = part(8, 640, seed=step)
                opt.step()
            assert has_plan(opt) != (cls is LAMB or not frozen)


@NO_COMPILER
def test_one_gradient_over_another_mesh_is_refused_on_the_short_way_too() -> None:
    with one_of(2):
        opt = two_steps(short=True)
        give(opt, 2)
        p, other = opt.param_groups[0]["params"][1], init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        p.grad = DTensor.from_local(p.grad.to_local(), other, [Shard(0)])
        with pytest.raises(ValueError, match="lies over"):
            opt.step()


@pytest.mark.parametrize(
    ("name", "plan", "shape", "dim", "refused"),
    [
        ("AdamW", "int8_split24", (4, 24, 32), 2, True),  # blocks
        ("AdamW", "bf16_sr", (4, 5, 6), 2, True),  # random bits
        ("NorMuon", "fp32", (4, 8, 6, 6), 2, True),  # rows of a matrix
        ("AdamW", "fp32", (4, 5, 6), 2, False),
        ("AdamW", "fp32_master", (4, 5, 6, 2), 3, False),
        ("AdamW", "bf16_sr", (4, 5, 6), 1, False),
        ("NorMuon", "fp32", (4, 8, 6, 6), 0, False),
    ],
)
def test_cuts_that_leave_no_stretch_of_rows_are_refused(
    name: str, plan: str, shape: tuple[int, ...], dim: int, refused: bool
) -> None:
    """When the optimizer is made."""
    words = rf"parameter 'w'.* cut along dimension {dim} of {len(shape)}.*shard it along dimension 0"
    with one_of(2), pytest.raises(ValueError, match=words) if refused else nullcontext():
        getattr(optim, name)([("w", nn.Parameter(part(*shape, of=Shard(dim))))], plan=plan)


def test_a_rule_that_sums_at_some_steps_agrees_on_gradients_at_every_step() -> None:
    @optimizer()
    def scaled_at_times(p, g, *, lr=hyper(1e-2, ge=0), k=hyper(3, ge=1), now=flag(every="k")):
        p = p - lr * (g / (norm(g) + 1e-8) if now else g)
        return p

    with one_of(2):
        opt = compiled(scaled_at_times, plan="fp32")([nn.Parameter(part(8, 640))])
        assert agreement.senders(opt._owner(), list(entries.of(opt.param_groups)))


# -- the workers of matrices -------------------------------------------------------------------------------------------
FACTORED_SIZES = (8, 32, 128, 512, 1024)


@pytest.mark.parametrize(
    ("model", "sizes", "of_factors"),
    [
        ("Llama-3.1-8B", scaling.SIZES, (32, 128)),
        ("Qwen3-30B-A3B", (32, 1024), (32,)),
        *(pytest.param(name, scaling.SIZES, FACTORED_SIZES, marks=pytest.mark.full) for name in scaling.models()),
    ],
)
def test_the_work_of_matrices_is_shared_evenly(model: str, sizes: tuple[int, ...], of_factors: tuple[int, ...]) -> None:
    """As docs/benchmarks/workers.md says; no rank has a tenth more than the mean or the largest matrix."""
    lines = scaling.matrices(model, sizes)
    text = (ROOT / "docs/benchmarks/workers.md").read_text(encoding="utf-8")
    assert all(line in text for line in [*lines, *scaling.HEAD])
    assert all(float(line.split("|")[5]) <= 1.1 and float(line.split("|")[8]) <= 4.0 for line in lines)
    for rule in ("SOAP", "Shampoo"):
        lines = scaling.factored(rule, model, of_factors)
        assert all(line in text for line in [*lines, *scaling.FACTORED_HEAD])
        assert all(float(line.split("|")[6]) <= 1.1 for line in lines)


def stacks(*shapes: tuple[int, ...]) -> tuple[workers.Stack, ...]:
    """Tensors that are cut along dimension 0, and the cost of their matrices."""
    return tuple(workers.Stack(torch.Size(s), ((0, 1),), "last", FLOPS["newton_schulz"](*s[-2:])) for s in shapes)


@pytest.mark.parametrize("mesh", [(1,), (5,), (16,), (2, 4)])
def test_workers_are_those_that_have_least_to_do(mesh: tuple[int, ...]) -> None:
    """Without holders, as a list that is searched each time has them; with them, within the bound of such lists."""
    n, sizes = math.prod(mesh), [8 * (k * k % 23 + 1) for k in range(60)]
    cuts = (None,) * (len(mesh) - 1) + ((0, 1),)
    for shapes in ([(16, size) for size in sizes], [(6, 16, size) for size in sizes]):
        given = tuple(stack._replace(cuts=cuts) for stack in stacks(*shapes))
        loads = [0] * n
        for stack, chosen in zip(given, workers.assign(given, mesh, 3), strict=True):
            for worker in chosen:
                loads[worker] += stack.flops
        costs = sorted((stack.flops for stack in given for _ in range(stack.matrices)), reverse=True)
        assert max(loads) <= sum(costs) / n + costs[0]
        if len(shapes[0]) == 2:
            plain = [0] * n
            for cost in costs:
                plain[plain.index(min(plain))] += cost
            assert sorted(loads) == sorted(plain)


@NO_COMPILER
def test_workers_stay_when_a_gradient_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow from all parameters that train, and from frozen ones as long as these have gradients."""
    assign, found = workers.assign, list[list[tuple[int, ...]]]()
    monkeypatch.setattr(workers, "assign", lambda *given: found.append(assign(*given)) or found[-1])
    with one_of(2):
        params = [nn.Parameter(part(*shape)) for shape in [(8, 64), (3, 24), (5, 24)]]
        params.append(nn.Parameter(part(8, 8, of=Replicate())))
        opt = Muon(params, plan="fp32", backend="cpp")
        for missing in (3, 0, 1):
            for k, p in enumerate(params):
                p.grad = None if k == missing else part(*p.to_local().shape, of=p.placements[0])
            opt.step()
        assert found[0] == found[1] == found[2] and list(map(len, found[0])) == [1, 1, 1, 1]
        params[1].requires_grad_(False)
        for missing in (0, 1):
            params[1].grad = part(3, 24) if missing == 0 else None
            opt.step()
        assert [list(map(len, x)) for x in found[3:]] == [[1, 1, 1, 1], [1, 1, 1]]


def test_parts_go_to_the_worker_and_back_once() -> None:
    """Each rank sends the bytes that the tool counts, in rounds of few matrices, and its rows of a factor one way."""
    shapes = [(97, 132), (5, 16, 24), (3, 40, 8), (64, 4), (2, 8)]
    found, factors, packets = [], [0] * 4, list[list[int]]()

    def count(into: Tensor, out: Tensor, expected: list[int], sizes: list[int], **_: Any) -> Mock:
        assert sum(expected) == len(into) and sum(sizes) == len(out)
        packets.append(sizes)
        return Mock()

    for rank in range(4):
        packets.clear()
        with one_of(4, rank), patch.object(dist, "all_to_all_single", count):
            mesh, parted = init_device_mesh("cpu", (4,)), []
            for k, chosen in enumerate(workers.assign(stacks(*shapes), (4,))):
                of = sharding.Layout(mesh, (Shard(0),), torch.Size(shapes[k]))
                part = torch.zeros([b - a for a, b in of.here or ()], dtype=torch.bfloat16)
                beside = sharding.field_layout(Field("left", "float64", space="mm"), of)
                rows, *columns = beside.here or ()
                left = torch.zeros(rows[1] - rows[0], *(b - a for a, b in columns), dtype=torch.float64)
                elsewhere = [chosen[e if len(chosen) > 1 else 0] != rank for e in range(*rows)]
                factors[rank] += sum(x.nbytes for x, sent in zip(left, elsewhere, strict=True) if sent)
                parted.append(workers.Parted(k, of, "last", chosen, [part, left, part], (of, beside, of), 2))
            for exchange in workers.run(parted, lambda _, operands, shapes: [xs[:1] for xs in operands], 1000):
                messages.serve([exchange])
        found.append(sum(size for sizes in packets for to, size in enumerate(sizes) if to != rank))
    assert found == [a + b for a, b in zip(scaling.share(shapes, 4).sent, factors, strict=True)]


@NO_COMPILER
def test_the_memory_of_a_step_over_parts_has_a_limit() -> None:
    """More matrices take no more than a table of addresses each: 64 numbers."""
    peaks = []
    with one_of(2):
        for count, room in ((16, 2**17), (64, 2**17), (64, None)):
            opt = Muon([nn.Parameter(part(64, 128, seed=k)) for k in range(count)], workspace=room, backend="cpp")
            for step in range(2):
                give(opt, step)
                opt._stepper.forget_tables()
                with torch.profiler.profile(profile_memory=True) as profile:
                    opt.step()
            events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            peaks.append(max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))))
    assert peaks[1] <= peaks[0] + 48 * 64 * 8 and peaks[2] > 2 * peaks[1]


@pytest.mark.parametrize(("rule", "plan"), [("SOAP", "fp32"), ("SOAP", "int8_split24"), ("Shampoo", "int8_split24")])
def test_workers_keep_what_a_later_function_of_the_step_reads(rule: str, plan: str) -> None:
    """The worker of a matrix of SOAP, half of it elsewhere, gets its bases and gradient once, and sends the turned
    gradient; factors and the update go both ways.  Both rules send what the tool counts."""
    packets: list[tuple[list[int], list[int]]] = []
    found = [0]
    with one_of(2), scaling.without_kernels():
        p = nn.Parameter(part(128, 128))
        opt = getattr(optim, rule)([("w", p)], plan=plan, precondition_frequency=2)
        for _ in range(3):
            p.grad = part(128, 128)
            with patch.object(dist, "all_to_all_single", lambda *given, **_: packets.append(given[2:4]) or Mock()):
                opt.step()
            found.append(sum(come[1] + go[1] for come, go in packets))
        size = {k: x.to_local().nbytes for k, x in opt.state[p].items() if isinstance(x, DTensor)}
    sent = [b - a for a, b in itertools.pairwise(found[1:])]
    if plan == "fp32":
        bases, factors = (sum(n for k, n in size.items() if k.startswith(x)) for x in ("basis", ("left", "right")))
        assert sent[0] == 4 * 4 * 128 * 128 + bases + 2 * factors
    else:  # to a scale of each factor each way: two ranks have 128 and 127 of a triangle's
        counted = [sum(scaling.share([(256, 128)], 2, rule, refresh).sent) for refresh in (False, True)]
        assert sent == pytest.approx(counted if rule == "SOAP" else counted[::-1], abs=2 * 2 * 2)
