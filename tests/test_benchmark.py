"""The benchmarks: whole runs over tiny tensors, and their reports."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import gpu_check, warm
from tools.bench import cpu, race
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
    more = ["--quick", "--add", "--only", "lion fp32", "--sizes", "8192", "--threads", "1", "--rounds", "2"]
    assert cpu.main([*more, "--backend", "reference", "--name", "Some CPU", "--out", str(tmp_path)]) == 0
    after = json.loads(path.read_text(encoding="utf-8"))["sections"]
    before = data["sections"]
    assert after["2x64, 1"] == before["2x64, 1"]
    assert [row["name"] for row in after["8192, 1"]["rows"]] == [BASE, "AdamW fp32", "Lion fp32"]
    assert after["8192, 1"]["rows"][1] == before["8192, 1"]["rows"][1]


@pytest.mark.slow
def test_a_dry_run_of_both_halves(tmp_path: Path, compiling: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
    emulation = {"OPTGEN_EMULATE": "90", "OPTGEN_ASSEMBLED": "8", "TRITON_CACHE_DIR": str(tmp_path / "kept")}
    run: Any = {"cwd": tmp_path, "env": compiling | emulation, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*command, "--minutes", "30"], **run)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (p for p in tmp_path.glob("*.json"))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert "error" not in found and not any(found["left"].values()) and len(found["memory"]) == 3
    assert list(found["sections"]) == [f"{name}, 1" for name in ("tensor", "matrix", "gpt2", "llama_8b")]
    assert all(section["rows"] for section in found["sections"].values())
    checks = {name.split("::")[1].split("[")[0] for name in gpu_check.outcomes(results_of(path))}
    assert len(checks) == 5
    # A second call does what the first one lacks: here a check and a row that it would have had no time for.
    tests = results_of(path).read_text(encoding="utf-8").splitlines()
    lost = found["sections"]["matrix, 1"]["rows"].pop()["name"]
    found["sections"]["matrix, 1"]["left_out"] = {lost: race.NO_TIME}
    path.write_text(json.dumps(found), encoding="utf-8")
    results_of(path).write_text("\n".join(tests[1:]) + '\n{"test": "cut sho', encoding="utf-8")
    done = subprocess.run([*command, "--minutes", "30"], **run)
    assert done.returncode == 0 and "0 checks made" in done.stdout and "1 checks made" in done.stdout
    rows = json.loads(path.read_text(encoding="utf-8"))["sections"]["matrix, 1"]
    assert lost in [row["name"] for row in rows["rows"]] and not rows["left_out"]
    assert len(gpu_check.outcomes(results_of(path))) == len(tests)


def results_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}_tests.jsonl")


class Pair:
    """Codes and scales as FlashOptim keeps them: no tensor, and nothing that torch knows."""

    def __init__(self, numel: int) -> None:
        self._data, self._signed = None, True
        self._quantized, self._scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(numel // 32).half()


@pytest.mark.parametrize(
    ("again", "moved"), [((0, 0, 0), 10.125), ((1, 1, 0), 14.1875), ((1, 0, 2), 15.1875), (None, None)]
)
def test_bytes_are_those_of_states_of_any_kind(again: Any, moved: float | None) -> None:
    def make(params: Any) -> Any:
        (p,) = params
        state = {"momentum": Pair(p.numel()), "bits": torch.zeros(p.shape, dtype=torch.uint8), "step": torch.ones(4)}
        return SimpleNamespace(param_groups=[{"params": params}], state={p: state}, step=lambda: None)

    one = race.Contender("one", race.BF16, make, again=again, weight=3.0)
    one.count("cpu")
    assert (one.kept, one.moved) == (4.0625, moved)


def test_an_archive_of_kernels_is_read_where_it_is_unpacked(tmp_path: Path) -> None:
    """Triton's cache names files by whole paths, and asks for all of them."""
    made, there = tmp_path / "here" / "kernels", tmp_path / "there" / "kernels"
    (made / "KEY").mkdir(parents=True)
    files = {name: str(made / "KEY" / name) for name in ("one.cubin", "one.json", "one.ttir")}
    for path in files.values():
        Path(path).write_bytes(b"{}")
    (made / "KEY" / "__grp__one.json").write_text(json.dumps({"child_paths": files}), encoding="utf-8")
    there.parent.mkdir()
    warm.pack(made).rename(warm.archive_of(there))
    assert warm.unpack(there) == 1
    group = json.loads((there / "KEY" / "__grp__one.json").read_text(encoding="utf-8"))["child_paths"]
    assert group == {name: str(there / "KEY" / name) for name in ("one.cubin", "one.json")}
    assert all(Path(path).read_bytes() == b"{}" for path in group.values())


def test_processes_that_check_end_with_a_run_that_is_killed() -> None:
    code = "import time; from tools.bench import race; race.end_with_parent(); print('x', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    parent += "; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "x\n"
    process.kill()
    process.wait()
    assert process.stdout.read() == ""  # both hold it open while they live
