"""Memory of large states on the CPU: mappings in huge pages, tensors like others, freed with their optimizer."""

import copy
import errno
import gc
import io
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import optgen.optim
from optgen.runtime.records import huge_pages
from tests import training
from tests.training import give, params_of


def test_large_tensors_start_elsewhere_in_their_pages_and_small_ones_are_usual() -> None:
    for shape in ((), (3, 4), (0,), (2, 0, 3), (1 << 19,), (700, 3, 1001)):
        for dtype in (torch.uint8, torch.int16, torch.float32, torch.bfloat16):
            made = [huge_pages.zeros(shape, dtype) for _ in range(3)]
            for t in made:
                assert (t.shape, t.dtype, t.is_contiguous(), t._base) == (torch.Size(shape), dtype, True, None)
                assert t.untyped_storage().nbytes() == t.nbytes and not t.any() and t.data_ptr() % 64 == 0
                t.fill_(1)
            assert all(bool((t == 1).all()) for t in made)
            if made[0].nbytes >= huge_pages.HUGE:
                assert len({t.data_ptr() % huge_pages.PAGE for t in made}) == 3


def test_machines_without_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(mmap, "mmap", refused)
    assert not huge_pages.zeros((1 << 21,), torch.uint8).any()
    monkeypatch.undo()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not huge_pages.zeros((1 << 21,), torch.uint8).any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_large_states_are_tensors_like_others() -> None:
    """Saved and copied in their own size, private to a process, and freed with their optimizer."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    opt = optgen.optim.Adam(training.parameters([(8000, 1000)]), plan="fp32")
    give(params_of(opt), 0)
    start = resident()
    opt.step()
    with_states = resident()
    assert with_states - start > 30e6
    state = opt.state[params_of(opt)[0]]["exp_avg"]
    torch.save(state, file := io.BytesIO())
    assert len(file.getvalue()) < state.nbytes + 4096
    other = copy.deepcopy(state)
    assert torch.equal(other, state) and other.untyped_storage().nbytes() == state.nbytes
    before = state[0].clone()
    if not (child := os.fork()):
        state[0].fill_(7)
        os._exit(0 if bool((state[0] == 7).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(state[0], before)
    del opt, state, other, file
    assert resident() < with_states - 30e6
