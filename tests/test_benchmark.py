"""The benchmarks: whole runs over tiny tensors, and their reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench import cpu
from tools.bench.race import BASE

ROOT = Path(__file__).resolve().parent.parent


RUN = [
    *("--quick", "--only", "adamw fp32", "--sizes", "8192", "2x64", "--threads", "1", "--rounds", "2"),
    *("--backend", "reference", "--name", "Some CPU"),
]


def test_a_run_on_the_cpu_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    assert cpu.main([*RUN, "--out", str(tmp_path)]) == 0
    path = tmp_path / "cpu-some-cpu.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"device", "code_path", "cores", "date", "compiler", "packages"} <= set(data["machine"])
    for key, title in (("8192, 1", "8,192 parameters, steps in a row"), ("2x64, 1", "2 tensors of 64")):
        found = data["sections"][key]
        base, ours = (row for row in found["rows"] if "a group" not in row["name"])
        assert (base["name"], ours["name"], found["title"]) == (BASE, "AdamW fp32", title) and not found["left_out"]
        assert ours["speed"]["n"] == 2 and ours["moved"] == 28 and ours["ns_per_parameter"]["q1"] > 0
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "## 2 tensors of 64, 1 thread" in text and "speed" in text
    assert " ns " not in text and " us " not in text  # of a CPU's times only ratios are written
    for written in (path.read_text(encoding="utf-8"), text):
        assert str(tmp_path) not in written and str(ROOT) not in written


@pytest.mark.slow
def test_a_dry_run_of_both_halves(tmp_path: Path, compiling: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
    command += ["--json", "--budget", "2000"]
    emulation = {"OPTGEN_EMULATE": "90", "OPTGEN_ASSEMBLED": "8", "TRITON_CACHE_DIR": str(tmp_path / "kept")}
    done = subprocess.run(command, cwd=tmp_path, env=compiling | emulation, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "bench_error" not in found and found["correctness"]["ok"]
    assert list(found["sections"]) == [f"{name}, 1" for name in ("tensor", "matrix", "gpt2", "llama_8b")]
    assert all(section["rows"] for section in found["sections"].values())
    checks = {name.split("::")[1].split("[")[0] for name in found["correctness"]["outcomes"]["PASSED"]}
    assert len(checks) == 5
