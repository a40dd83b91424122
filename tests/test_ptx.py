"""Compiled Triton kernels, executed without a device: tests/ptx emulates the PTX of sm_90 on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = "tests/test_triton_stages.py::test_strict_kernels_give_the_bits_of_eager_torch"
EMULATED = (
    "tests/test_triton_strict.py::test_same_bits",
    "tests/test_triton_strict.py::test_floor_of_subnormals",
    f"{STAGES}[lamb-blocks16-5x70-3x128-300-scalar]",
    "tests/ptx/emulated.py",
    "tests/test_capturable.py::test_steps_counted_on_the_device_are_the_same_steps[AdamW-coded]",
)
"""Run in one process that compiles: strict rules of one sweep, one of several, what emulation notices; then fast maths,
one that is counted on the device."""


@pytest.mark.long
def test_compiled_kernels_are_right_in_the_emulator(compiling: dict[str, str]) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *EMULATED]
    env = {**compiling, "OPTGEN_EMULATE": "90"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
