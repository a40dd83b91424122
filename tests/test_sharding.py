"""Parameters of several ranks: processes on this machine, and the geometry that all of them count on."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from optgen.optim import AdamW
from optgen.runtime.layout import sharding
from tests import ranks
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


@pytest.mark.ranks
def test_every_case_on_one_to_four_ranks() -> None:
    expected = [
        f"{world} {name}"
        for world in ranks.RANKS
        for name, (_, worlds) in ranks.CASES.items()
        if world in worlds and name != "kernels_over_parts"
    ]
    assert ran("--but", "kernels_over_parts", "--kernels", "reference") == expected


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["triton", "cpp"])
def test_kernels_over_parts(interpreter: dict[str, str], backend: str) -> None:
    cases = ["kernels_over_parts", "parts_made_under_inference_mode"]
    assert ran(*cases, "--ranks", "2", "--kernels", backend, **interpreter) == [f"2 {name}" for name in cases]


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


def test_parts_cover_the_tensor_once() -> None:
    for rows, count in itertools.product((0, 1, 5, 12, 97), (1, 2, 3, 4, 7)):
        cut = [sharding.region(torch.Size((rows, 2)), (count,), (k,), ((0, 1),))[0] for k in range(count)]
        assert [i for a, b in cut for i in range(a, b)] == list(range(rows))


def test_the_largest_of_all_ranks_is_a_number_s_order() -> None:
    """int32 in the order of fp32, NaN above all; and back."""
    x = torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 2.5, torch.inf, torch.nan])
    ordered = sharding._ordered(x)
    assert (ordered[1:] > ordered[:-1]).all()
    back = sharding._unordered(ordered)
    assert torch.equal(back[:-1], x[:-1])
    assert back[-1].isnan()
    assert sharding._unordered(sharding._ordered(torch.tensor(-torch.nan))).isnan()


def test_what_a_step_on_1024_ranks_keeps_and_sends() -> None:
    """docs/scaling.md says what the tool counts."""
    found = subprocess.run(
        [sys.executable, ROOT / "tools" / "scaling.py"], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert found.returncode == 0, found.stderr[-8000:]
    table = [line for line in found.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(scaling.RULES)
    assert "\n".join(table) in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_element_wise_rules_send_nothing_where_no_vector_cuts_blocks() -> None:
    code = (
        "from tools import scaling; from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "import torch.distributed as dist\n"
        "scaling.shapes = lambda: [(8192, 8192), (1024, 8192), (100, 8192)]\n"
        "for rank, here in ((0, 8 + 1 + 1), (1023, 8 + 1)):\n"
        "    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=1024)\n"
        "    row = scaling.row('AdamW', 1024)\n"
        "    assert row.sent == {}, row\n"
        "    assert row.elements == here * 8192, row\n"
        "    assert row.states == here * 8192 * 3 + here * (8192 // 64) * 4, row\n"
        "    dist.destroy_process_group()\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert found.returncode == 0, found.stderr[-8000:]


@pytest.mark.parametrize("frozen", [False, True])
def test_pieces_of_flattened_parameters_are_refused(frozen: bool) -> None:
    """When the optimizer is made, or at the first step of one that was frozen then."""
    p = torch.nn.Parameter(torch.ones(100), requires_grad=not frozen)
    p._fsdp_flattened = True

    def train() -> None:
        opt = AdamW([("w", p)], plan="fp32", backend="reference")
        p.requires_grad_().grad = torch.ones(100)
        opt.step()

    with pytest.raises(ValueError, match=r"'w' .* was flattened and cut by FullyShardedDataParallel.*fully_shard"):
        train()
    assert torch.equal(p, torch.ones(100))
