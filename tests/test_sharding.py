"""Parameters of several ranks: processes on this machine, the geometry that all count on, and what one rank does."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from generated import LAMB, AdamW
from optgen.runtime.cpu import native
from optgen.runtime.layout import sharding
from optgen.runtime.step import fast_path
from tests import ranks
from tests.harness import unoptimized
from tests.training import bits
from tools import scaling

ROOT = Path(__file__).resolve().parents[1]


def ran(*arguments: str, **environment: str) -> list[str]:
    """Return the names of the cases that processes of this machine have passed."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.ranks", "--device", "cpu", *arguments],
        capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr[-8000:]
    return [line.removeprefix("ok ") for line in found.stdout.splitlines() if line.startswith("ok ")]


OF_KERNELS = ("kernels_over_parts", "matrices_have_one_worker")
"""Cases that eager torch has not: there every rank steps whole tensors, or none has a kernel."""


@pytest.mark.ranks
def test_every_case_on_one_to_four_ranks() -> None:
    expected = [
        f"{world} {name}"
        for world in ranks.RANKS
        for name, (_, worlds) in ranks.CASES.items()
        if world in worlds and name not in OF_KERNELS
    ]
    assert ran("--but", *OF_KERNELS, "--kernels", "reference") == expected


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_kernels_over_parts(interpreter: dict[str, str], backend: str) -> None:
    assert ran("kernels_over_parts", "--ranks", "2", "--kernels", backend, **interpreter) == ["2 kernels_over_parts"]


@pytest.mark.ranks
def test_each_matrix_is_worked_on_by_one_rank() -> None:
    names = ["whole_matrices", "stacks_and_heads", "matrices_have_one_worker"]
    done = ran(*names, "--ranks", "2", "4", "3", "--kernels", "cpp")
    assert done == [f"{n} {name}" for n in (2, 4, 3) for name in names if n in ranks.CASES[name][1]]


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
    """Size and first index of each rank's part, as DTensor has them; or refused where it is in pieces."""
    for mesh, kinds in MESHES:
        for placements in kinds:
            cuts = tuple(None if p.is_replicate() else (p.dim, int(getattr(p, "split_factor", 1))) for p in placements)
            for coordinate in itertools.product(*map(range, mesh)):
                size, first = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
                where = (torch.Size(shape), mesh, coordinate, cuts)
                if isinstance(placements[0], _StridedShard) and shape[0] % (mesh[0] * mesh[1]):
                    with suppress(ValueError):
                        assert math.prod(b - a for a, b in sharding.region(*where)) == math.prod(size)
                    continue
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


# -- the short way through a step over DTensors ---------------------------------------------------------------------


def part(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, of: Placement = Shard(0)) -> DTensor:
    """This rank's part of a tensor on two ranks."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return DTensor.from_local(value, init_device_mesh("cpu", (2,)), [of])


def give(opt: Any, seed: int) -> None:
    for k, p in enumerate(opt.param_groups[0]["params"]):
        p.grad = part(*p.to_local().shape, dtype=p.dtype, seed=100 * seed + k)


def two_steps(short: bool) -> Any:
    """An optimizer that takes the short way from now on, or never."""
    params = [nn.Parameter(part(*shape, seed=k)) for k, shape in enumerate([(8, 640), (5, 130), (0, 7), (1,)])]
    opt = AdamW(params, plan="int8_split24", backend="cpp", lr=1e-2)
    if not short:
        opt._stepper.fast_path.keep = lambda *_: None
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
    run, taken = fast_path.CachedStep.run, list[bool]()
    monkeypatch.setattr(fast_path.CachedStep, "run", lambda *args: taken.append(run(*args)) or taken[-1])
    found = []
    with one_of(2), unoptimized():
        for short in (True, False):
            opt = two_steps(short)
            params = opt.param_groups[0]["params"]
            p = params[0]
            assert (opt._stepper.fast_path.last is not None) is short
            CHANGES[change](p, opt.state[p])
            taken.clear()
            opt.step()
            assert not short or taken == [change in ("nothing", "gradient elsewhere")]
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
    with one_of(2), unoptimized():
        params = [nn.Parameter(part(8, 640)), nn.Parameter(part(*shape))]
        opt = cls(params, plan="int8_split24", backend="cpp")
        for frozen in (True, False):
            params[1].requires_grad_(not frozen)
            params[1].grad = None
            for step in range(3):
                params[0].grad = part(8, 640, seed=step)
                opt.step()
            assert (opt._stepper.fast_path.last is None) == (cls is LAMB or not frozen)
