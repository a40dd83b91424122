"""Steps on a device that is not there, by Triton's own launchers: tests/ptx/pretended.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMON = "adamw-int8_split24-bfloat16 or lion-fp32-float32"
WHOLE = "bits_of_eager_torch and (fp32-float32 or int8_split24-bfloat16)"


@pytest.mark.parametrize(
    ("which", "rules"),
    [(f"refused or same_bits and AdamW or bits_of_eager_torch and ({COMMON})", "adamw lion"), pytest.param(
        f"same_bits or {WHOLE}", "adamw lion sgd came lamb adafactor sm3 prodigy muon", marks=pytest.mark.slow,
    )],
    ids=["common", "nine rules"],
)  # fmt: skip
def test_steps_on_a_pretended_device(which: str, rules: str, compiling: dict[str, str]) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", which]
    env = {**compiling, "OPTGEN_EMULATE": "90", "OPTGEN_PRETEND": "1", "OPTGEN_TEST_DEVICE": "cuda"}
    env |= {"OPTGEN_TEST_KERNELS": rules, "TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "pretended")}
    files = ["tests/ptx/on_device.py", "tests/test_cuda.py"]
    done = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
