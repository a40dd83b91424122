"""Compiled Triton kernels, executed without a device: tests/ptx emulates the PTX of sm_90 on the CPU."""

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from optgen.runtime.step import launch
from tests.test_triton_strict import CASES

ROOT = Path(__file__).parents[1]
STAGES = "tests/test_triton_stages.py::test_strict_kernels_give_the_bits_of_eager_torch"
EMULATED = (
    "tests/test_triton_strict.py::test_floor_of_subnormals",
    f"{STAGES}[lamb-blocks16-5x70-3x128-300-scalar]",
    "tests/test_elementary.py::test_backends_have_the_bits_of_the_definitions_and_fast_maths_is_near[strict]",
    "tests/ptx/emulated.py",
    "tests/test_views.py::test_all_backends_write_the_columns_that_torchao_makes_of_any_weight[100-torch.bfloat16]",
    "tests/test_capturable.py::test_steps_counted_on_the_device_are_the_same_steps[AdamW-coded]",
)
"""Run in one process that compiles, behind rules of one sweep: rounding down, a rule of several sweeps, functions of
elements, what emulation notices; then fast maths: views, a view along columns, one that is counted on the device."""

OF_ONE_SWEEP = [f"tests/test_triton_strict.py::test_same_bits[{'-'.join(map(str, case))}]" for case in CASES]
"""Strict rules of one sweep under each kind of plan, of which every day has four; `make test-full` emulates all plans
(tests/test_whole_product.py)."""

CACHE = str(ROOT / ".pytest_cache" / "emulated")
"""Compiled kernels, most without machine code, for the next run."""


@pytest.mark.parametrize(("capability", "version", "warned"), [(9, "12.9", 0), (10, "12.9", 1), (10, "13.4", 0)])
def test_an_assembler_that_fuses_in_strict_maths_is_warned_of(
    capability: int, version: str, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(knobs, "nvidia", SimpleNamespace(ptxas_blackwell=SimpleNamespace(version=version)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        launch._warn_fused.__wrapped__(torch.device("cuda"))
    assert ["update Triton" in str(w.message) for w in found] == [True] * warned


@pytest.mark.long
def test_compiled_kernels_are_right_in_the_emulator(compiling: dict[str, str]) -> None:
    pytest.importorskip("triton")
    drawn = random.Random(os.environ["OPTGEN_SAMPLE_SEED"]).sample(OF_ONE_SWEEP, 4)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    env = {**compiling, "OPTGEN_EMULATE": "90", "OPTGEN_RACES": "1", "OPTGEN_ASSEMBLED": "8", "TRITON_CACHE_DIR": CACHE}
    done = subprocess.run([*command, *drawn, *EMULATED], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
