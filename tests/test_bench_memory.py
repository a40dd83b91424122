"""The tool that measures whole training steps, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can forget the peak of a process")
def test_released_gradients_are_not_in_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_BACKEND")  # eager torch takes more room than kernels
    layers, width = 24, 512
    said: list[str] = []
    given = ["--layers", str(layers), "--width", str(width), "--out", str(tmp_path), "--name", "here"]
    assert bench_memory.main([*given, "--ways", "ordinary", "released"], said.append) == 0
    ordinary, released = json.loads((tmp_path / "memory-here.json").read_text())["rows"]
    assert [round(row["counted"], 4) for row in (ordinary, released)] == [7.0625, 5.0625]
    numel = layers * width * width
    # Each of a layer's tensors may leave a page unused at both ends, and the process moves by itself.
    page = (4096 * 8 * layers + 2**20) / numel
    # All but two layers' gradients are gone (one is being made while one is used), 2 bytes each.
    assert ordinary["per_parameter"] - released["per_parameter"] >= 2 * (1 - 2 / layers) - page
    assert released["per_parameter"] >= 5.0625 - page
    assert "gradients released | " in (tmp_path / "memory-here.md").read_text()
    assert len(said) == 2
