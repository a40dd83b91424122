"""Memory of the states on the CPU: one mapping, tensors like others, freed with their optimizer."""

import copy
import errno
import gc
import io
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import optgen.optim
from optgen.runtime.records import arena
from optgen.runtime.records.arena import Arena
from tests import training
from tests.training import everything, give, params_of


def test_arena_layout() -> None:
    sizes = [1 << 20, 300, (1 << 20) + 4, 100 << 10, 64, 3 << 20]
    room = Arena(sizes)
    tensors = [room.zeros((size // 4,), torch.float32) for size in sizes]
    starts = [t.data_ptr() for t in tensors]
    large = [s % arena.PAGE for s, size in zip(starts, sizes, strict=True) if size >= arena.LARGE]
    assert len(set(large)) == len(large)
    assert all(place % (2 * arena.SKEW) != 0 for place in large)
    assert all(start % 64 == 0 for start in starts)
    ends = [s + size for s, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] - starts[0] < sum(sizes) + 4 * 2 * arena.PAGE
    for t, size in zip(tensors, sizes, strict=True):
        assert t.untyped_storage().nbytes() == size // 4 * 4
        assert t.is_contiguous() and t._base is None and not t.any()
        t.fill_(1)
    assert all(bool((t == 1).all()) for t in tensors)
    over = room.zeros((1 << 20,), torch.float32)
    assert not over.any()
    assert not starts[0] <= over.data_ptr() < ends[-1]
    for shape in ((), (3, 4), (0,), (2, 0, 3), (1,)):
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.float32, torch.bfloat16, torch.float16):
            t = Arena([1 << 20, 4096]).zeros(shape, dtype)
            assert (t.shape, t.dtype, t.is_contiguous()) == (torch.Size(shape), dtype, True)


def test_small_arenas_and_machines_without_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Arena([100, 200])._map is None
    assert Arena([])._map is None

    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(mmap, "mmap", refused)
    room = Arena([1 << 20])
    assert room._map is None
    assert room.zeros((4,), torch.uint8).tolist() == [0] * 4
    monkeypatch.undo()
    monkeypatch.delattr(mmap, "MAP_ANONYMOUS")
    assert Arena([1 << 20])._map is None


def test_states_lie_in_one_mapping_and_are_tensors_like_others() -> None:
    opt = optgen.optim.Adam(training.parameters([(300, 1000), (5,), (200, 1000)]), plan="fp32")
    training.train(opt, [0])
    saved, before = opt.state_dict(), everything(opt)
    for loaded in (False, True):
        if loaded:
            opt.load_state_dict(saved)
            assert everything(opt) == before
        buffers = [opt.state[p]["exp_avg"] for p in params_of(opt)]
        places = sorted(b.data_ptr() for b in buffers)
        assert places[-1] - places[0] < 2 * 500_000 * 4 + 10 * arena.PAGE
        for p, buffer in zip(params_of(opt), buffers, strict=True):
            assert buffer.untyped_storage().nbytes() == p.numel() * 4
            assert len(pickle.dumps(buffer)) < p.numel() * 4 + 4096
            torch.save(buffer, file := io.BytesIO())
            assert len(file.getvalue()) < p.numel() * 4 + 4096
            other = copy.deepcopy(buffer)
            assert other.untyped_storage().nbytes() == p.numel() * 4
            assert torch.equal(other, buffer) and buffer.any()
    assert {kept["exp_avg"].data_ptr() for kept in saved["state"].values()}.isdisjoint(places)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_states_are_freed_with_their_optimizer_and_private_to_a_process() -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    opt = optgen.optim.Adam(training.parameters([(4000, 1000)]), plan="fp32")
    give(params_of(opt), 0)
    start = resident()
    opt.step()
    with_states = resident()
    assert with_states - start > 30e6
    buffer = opt.state[params_of(opt)[0]]["exp_avg"][0]
    before = buffer.clone()
    if not (child := os.fork()):
        buffer.fill_(7)
        os._exit(0 if bool((buffer == 7).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(buffer, before)
    del opt, buffer
    assert resident() < with_states - 30e6
