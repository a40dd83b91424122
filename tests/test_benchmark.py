"""The benchmarks: what they count, their statistics and reports, and whole runs over tiny tensors."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from optgen.driver import explain, load, targets
from tools.bench import cpu, race
from tools.bench.race import BASE, COPY, FP32, Contender, Lane, Target

ROOT = Path(__file__).resolve().parent.parent


def sgd(name: str, kept: float = math.nan, make: Any = None, **more: Any) -> Contender:
    return Contender(name, FP32, make or (lambda p: torch.optim.SGD(p, lr=0.1)), kept=kept, **more)


# What a step moves ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["AdamW", "Lion", *race.SEVERAL_SWEEPS])
def test_traffic_is_that_of_the_step_that_is_generated(name: str) -> None:
    """Rules that keep values of rows and columns move these too: at most four, in fp32, of a matrix of 128 x 128."""
    for c in race.generated("triton"):
        rule, _, plan = c.name.partition(" ")
        if rule == name and c.dtype == torch.bfloat16 and "released" not in plan:
            spec = load.find_spec(name.lower())
            case = next(x for x in targets.cases(spec, load.find_plan(plan)) if x.param.torch == "bfloat16")
            c.count("cpu")
            most = 2 * 4 * 4 / 128 if name in ("CAME", "Adafactor") else 0
            said = explain.explain(spec, load.find_plan(plan), "bfloat16", case.flags)
            assert 0 <= c.moved - said.traffic <= most


# Statistics -----------------------------------------------------------------------------------------------------------
def test_ratios_are_medians_of_rounds() -> None:
    """A round in which the machine was slow for all changes no ratio, and a round that one sat out has none."""

    def lane(name: str, *seconds: float, first: int = 0, ours: bool = False) -> Lane:
        found = sgd(name, 12, ours=ours)
        return Lane(found, Timer("pass"), 4, dict(enumerate(seconds, first)))

    lanes = {
        BASE: lane(BASE, 3.0, 30.0, 3.0, 300.0),
        "ours": lane("ours", 1.5, 15.0, 1.5, ours=True),
        "peer": lane("peer", 60.0, 6.0, first=1),
        COPY: lane(COPY, 0.75, 7.5, 0.75, 75.0),
    }
    row = race._row("ours", lanes, numel=10, copied=140)
    assert row["speed"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 3}
    assert row["versus"] == {BASE: row["speed"], "peer": {"median": 4.0, "q1": 4.0, "q3": 4.0, "n": 2}}
    assert row["of_copy"]["median"] == 0.5  # 28 bytes for each of 10 elements in 1.5 s, where 280 are copied in 0.75 s
    assert row["ns_per_parameter"]["median"] == 0.15e9 and row["us"]["median"] == 1.5e6
    assert race._row(BASE, lanes, 10, 140)["speed"] is None


# Sections -------------------------------------------------------------------------------------------------------------
# Runs -----------------------------------------------------------------------------------------------------------------

RUN = [
    *("--quick", "--only", "adamw fp32", "--sizes", "8192", "2x64", "--threads", "1", "--rounds", "2"),
    *("--backend", "reference", "--name", "Some CPU"),
]


def test_a_run_on_the_cpu_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    monkeypatch.setattr(cpu, "TARGETS", (Target("AdamW fp32", "2x64", 1e9),))
    assert cpu.main([*RUN, "--out", str(tmp_path)]) == 0
    assert cpu.main([*RUN, "--out", str(tmp_path), "--strict"]) == 1
    path = tmp_path / "cpu-some-cpu.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"device", "code_path", "cores", "date", "compiler", "packages"} <= set(data["machine"])
    for key, title in (("8192, 1", "8,192 parameters, steps in a row"), ("2x64, 1", "2 tensors of 64")):
        found = data["sections"][key]
        base, ours = found["rows"]
        assert (base["name"], ours["name"], found["title"]) == (BASE, "AdamW fp32", title) and not found["left_out"]
        assert ours["speed"]["n"] == 2 and ours["moved"] == 28 and ours["ns_per_parameter"]["q1"] > 0
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "## 2 tensors of 64, 1 thread" in text and "missed" in text
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
