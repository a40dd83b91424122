"""Steps in CUDA graphs, as tools/gpu_check.py checks them; and that check itself, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from gpu import graphs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:overflow")


@pytest.mark.cuda
def test_replayed_steps_are_the_steps_outside_a_graph(compiling: dict[str, str]) -> None:
    text = "import torch; from gpu import graphs; print([o for o in graphs.check(torch.device('cuda')) if o.problems])"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    done = subprocess.run(
        [sys.executable, "-c", text], env={**compiling, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SHAPES", ((3, 8), (4, 5)))
    monkeypatch.setattr(graphs, "STEPS", 2)
    monkeypatch.setattr(graphs, "SETTINGS", graphs.SETTINGS[1:2])


@pytest.mark.usefixtures("small")
def test_the_check_passes_where_both_sides_are_the_same() -> None:
    found = list(graphs.check(torch.device("cpu")))
    assert [outcome.problems for outcome in found] == [[], []]


@pytest.mark.usefixtures("small")
def test_the_check_sees_a_step_that_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", lambda device: lambda work: lambda: None)
    assert all("step 1: tensor 0 is not" in outcome.problems[0] for outcome in graphs.check(torch.device("cpu")))


class Refused(Exception):
    """As Triton's errors are: of no kind but Exception."""


@pytest.mark.usefixtures("small")
def test_an_error_of_any_kind_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise Refused("out of registers")

    monkeypatch.setattr(graphs, "_check_one", refuse)
    assert [o.problems for o in graphs.check(torch.device("cpu"))] == [["Refused: out of registers"]] * 2
