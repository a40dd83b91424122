"""The CPU benchmark: its statistics, what it counts, the ceilings' loop, and a whole run over tiny tensors."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import bench_cpu  # noqa: E402
import cpu_kernel  # noqa: E402
from cpu import ceiling, contenders, machine, race, report  # noqa: E402
from gpu.contenders import gradients  # noqa: E402

from optgen.runtime import native  # noqa: E402

BASE, BF16, FP32 = contenders.BASE, torch.bfloat16, torch.float32


def entrant(name: str, make: Any = None, kept: float = 4, dtype: torch.dtype = FP32, **more: Any) -> contenders.Entrant:
    return contenders.entrant(name, dtype, kept, make or (lambda p: torch.optim.SGD(p, lr=0.1)), **more)


def lane(one: contenders.Entrant, seconds: dict[int, float], pattern: ceiling.Streams) -> race.Lane:
    return race.Lane(one.name, None, 1, len(seconds), one, pattern, seconds=seconds)


# Statistics -----------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_of_rounds() -> None:
    """A round in which the machine was slow for all changes no ratio, and a round that one sat out has none."""
    streams = ceiling.Streams((4.0, 4.0, 4.0), (4.0,))
    base = lane(entrant(BASE), {0: 3.0, 1: 30.0, 2: 3.0, 3: 300.0}, streams)
    ours = lane(entrant("ours", ours=True), {0: 1.5, 1: 15.0, 2: 1.5}, streams)
    peer = lane(entrant("peer"), {1: 60.0, 2: 6.0}, streams)
    sweep = race.Lane("ceiling", None, 1, 4, streams=streams, seconds={0: 0.75, 1: 7.5, 2: 0.75, 3: 75.0})
    row = race.row(race.size("10"), ours, [base, ours, peer, sweep])
    assert row["speed"] == {"median": 2.0, "q1": 2.0, "q3": 2.0, "n": 3}
    assert row["versus"] == {"peer": {"median": 4.0, "q1": 4.0, "q3": 4.0, "n": 2}}
    assert row["share_of_ceiling"]["median"] == 0.5
    assert row["ns_per_parameter"]["median"] == 0.15e9 and row["us_per_step"]["median"] == 1.5e6
    assert "speed" not in race.row(race.size("10"), base, [base, ours])
    assert race.ceiling_row(race.size("10"), sweep, streams)["gb_s"]["q3"] == pytest.approx(280 / 0.75 * 1e-9, rel=1e-3)


def test_slow_contenders_take_part_in_rounds_that_lie_evenly() -> None:
    slow = race.Lane("slow", None, 1, 3)
    assert [k for k in range(30) if slow.takes_part(k, 30)] == [9, 19, 29]
    assert all(race.Lane("fast", None, 1, 30).takes_part(k, 30) for k in range(30))


def test_sizes() -> None:
    assert race.size("3e7").shapes == [(29_999_104,)] and race.size("3e7").steps == 1
    assert race.size("1e5").steps == 100 and race.size("1e6").steps == 20
    assert race.size("5000").shapes == [(5000,)]  # small ones as they are
    assert len(race.size("gpt2").shapes) == 148 and not race.size("gpt2").whole_step
    small = race.size("148x512")
    assert small.shapes == [(512,)] * 148 and small.whole_step
    for wrong in ("many", "0", "0x512", "inf", "1x2x3"):
        with pytest.raises(ValueError, match="is no size"):
            race.size(wrong)


def test_targets_are_judged_by_what_was_measured() -> None:
    def part(threads: int, speed: float, versus: float) -> dict[str, Any]:
        found = {"name": contenders.FLAGSHIP, "speed": {"median": speed}}
        found["versus"] = {"DeepSpeedCPUAdam fp32": {"median": versus}}
        return {"size": "3e7", "threads": threads, "rows": [found]}

    verdicts = {
        (t["name"], t["against"], t["size"], t["threads"]): t["verdict"]
        for t in race.judge([part(1, 1.3, 1.0), part(2, 1.4, 1.31)], ["avx512f"])
    }
    ours = contenders.FLAGSHIP
    assert verdicts[ours, BASE, "3e7", 1] == "met" and verdicts[ours, BASE, "3e7", 2] == "missed"
    assert verdicts[ours, "DeepSpeedCPUAdam fp32", "3e7", 1] == "missed"
    assert verdicts[ours, "DeepSpeedCPUAdam fp32", "3e7", 2] == "met"
    assert verdicts[ours, BASE, "148x512", 1] == "not measured"
    assert verdicts[f"{ours}, avx2", BASE, "3e7", 1] == "not promised without avx2"


def test_every_target_is_of_a_contender_and_of_a_size_that_are_measured() -> None:
    ours = {c.name for c in contenders.generated("cpp")}
    others = {BASE, "DeepSpeedCPUAdam fp32", "bitsandbytes AdamW8bit fp32"}
    others |= {f"torchao {name} fp32" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}
    for target in race.TARGETS:
        assert target.name in ours and target.against in others and target.size in bench_cpu.SIZES
        assert target.threads in (1, 2) and target.least >= 1
    assert set(bench_cpu.QUICK) <= ours | {c.name for c in contenders.torch_s_own()}


# What a step moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept", "moved"),
    [
        (BASE, 12, 28),
        ("torch AdamW fused bf16", 6, 14),
        ("torch SGD momentum fused fp32", 8, 20),
        ("AdamW int8_split24", 5.0625, 12.125),
        ("AdamW fp32", 12, 28),
        ("Lion int8_split24", 4.03125, 10.0625),
    ],
)
def test_bytes_are_counted_on_the_tensors(name: str, kept: float, moved: float) -> None:
    """As the formats say; the estimate that batches are made by is the same."""
    (one,) = (c for c in contenders.torch_s_own() + contenders.generated("reference") if c.name == name)
    runner = one.build([(8192,)], gradients([(8192,)], one.dtype, torch.device("cpu")), torch.device("cpu"))
    runner.step()
    found = contenders.streams(runner)
    assert (found.kept, found.total) == (kept, moved) == (one.kept, one.traffic)
    assert found.pattern == found


def test_tensors_within_a_wrapper_and_shared_ones_are_counted_once() -> None:
    class Wrapped(torch.Tensor):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

    p = torch.nn.Parameter(torch.zeros(1024))
    p.grad = torch.zeros(1024)
    wrapped = torch.zeros(1024).as_subclass(Wrapped)
    wrapped.codes, wrapped.scale = torch.zeros(1024, dtype=torch.uint8), torch.zeros(16)  # type: ignore[attr-defined]
    table = torch.zeros(256)

    class Holder:
        state = {p: {"step": torch.zeros(()), "average": wrapped, "table": table, "again": table, "note": 3}}

    runner = contenders.Runner(entrant("wrapped"), [p], Holder())
    assert contenders.streams(runner) == ceiling.Streams((4.0, 1.0, 1.0, 0.0625), (4.0,))


def test_batches_keep_what_all_are_compared_with_and_fit() -> None:
    field = [entrant(BASE, kept=12), entrant("a", kept=6), entrant(contenders.FLAGSHIP, kept=5, dtype=BF16)]
    field += [entrant("b", kept=6), entrant("c", kept=99)]
    # with gradients of both kinds (6) and the widest pattern (16): 39 for the two, 6 for each of the others
    runs, left_out = contenders.batches(field, 1000, memory=46_000)
    assert [[c.name for c in run] for run in runs] == [
        [BASE, contenders.FLAGSHIP, "a"],
        [BASE, contenders.FLAGSHIP, "b"],
    ]
    assert [c.name for c in left_out] == ["c"]
    assert contenders.batches(field, 1000, memory=38_000) == ([], field)


# Ceilings -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
def test_a_sweep_changes_every_word_of_its_streams_once_and_nothing_else() -> None:
    loop, numel = ceiling.library(), 3 * ceiling.PIECE - 7
    pattern = ceiling.Streams((4.0, 1.0, 0.1875, 0.015625), (2.0,))
    memory = ceiling.Memory([pattern, ceiling.Streams((4.0, 4.0), ())], numel)
    sweep = ceiling.Ceiling(loop, pattern, memory)
    words = [256, 64, 12, 1, 128]
    starts = memory.streams(words)
    assert len({start % ceiling.PAGE for start in starts}) == len(starts)
    whole = (ctypes.c_uint64 * (len(memory._mapped) // 8)).from_buffer(memory._mapped)
    for _ in range(2):
        sweep.step()
    changed = {memory._start + 8 * k for k, value in enumerate(whole) if value}
    expected = {start + 8 * k for start, count in zip(starts[:-1], words, strict=False) for k in range(3 * count)}
    assert changed == expected and {value for value in whole if value} == {2}


def test_runs_cover_a_piece() -> None:
    words = [256, 128, 65, 2]
    runs = ceiling.order(words)
    for stream, count in enumerate(words):
        own = [run for run in runs if run[0] == stream]
        assert sum(run[2] for run in own) == count
        assert [run[1] for run in own] == [sum(run[2] for run in own[:k]) for k in range(len(own))]


# Sections -------------------------------------------------------------------------------------------------------------


def test_a_contender_that_fails_is_left_out_and_said_to_be() -> None:
    def refuse(params: Any) -> Any:
        raise RuntimeError("cannot open /home/somebody/cache/kernel.so")

    said: list[str] = []
    before = torch.get_num_threads()
    field = [entrant(BASE), entrant("bad", refuse), entrant(contenders.FLAGSHIP, ours=True)]
    found = race.section(race.size("3x40"), 1, field, 4, None, said.append)
    assert [r["name"] for r in found["rows"]] == [BASE, contenders.FLAGSHIP]
    assert found["left_out"] == {"bad": "RuntimeError: cannot open kernel.so"} and "bad left out" in said[0]
    assert found["rows"][1]["speed"]["n"] == 4 and found["elements"] == 120 and found["whole_step"]
    assert torch.get_num_threads() == before
    nothing = race.section(race.size("1e4"), 1, field, 4, None, memory=100.0)
    assert nothing["rows"] == [] and set(nothing["left_out"]) == {c.name for c in field}


def test_a_code_path_holds_while_its_contender_is_built_and_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(os.environ.get("OPTGEN_ISA"))

    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    field = [entrant(BASE), entrant("portable", lambda p: Looking(p, lr=0.1), isa="portable")]
    race.section(race.size("2x8"), 1, field, 2, None)
    assert set(seen) == {"portable"} and "OPTGEN_ISA" not in os.environ


def test_what_libraries_print_is_not_seen(capfd: pytest.CaptureFixture[str]) -> None:
    with race.silence():
        os.write(1, b"a library")
        os.write(2, b"its compiler")
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "")


# Reports --------------------------------------------------------------------------------------------------------------


def test_reports_hold_no_paths() -> None:
    assert machine.scrub("'/usr/bin/c++' -I/opt/x/include a.cpp: 1/2, and/or") == "'c++' -Iinclude a.cpp: 1/2, and/or"
    assert machine.scrub("no module named 'a' (~/b/c.py)") == "no module named 'a' (c.py)"


def test_processor_is_named_as_it_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu avx2 fma avx512f\n", encoding="utf-8")
    assert machine.cpu_model(str(path)) == "Some CPU 9000"
    assert machine.vectors(str(path)) == ["fma", "avx2", "avx512f"]
    assert machine.vectors(str(tmp_path / "none")) == []
    hidden = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Some CPU\n"
    path.write_text(hidden, encoding="utf-8")
    assert machine.cpu_model(str(path)) == "Some CPU (family 26, model 2)"


def test_sentences_join_what_has_one_reason() -> None:
    assert report.left_out({"a": "x", "b": "y", "c": "x"}, "Left out") == ["Left out: a and c (x); b (y).", ""]
    assert report.left_out({}, "Left out") == []


def test_names_in_the_picture_cover_nothing() -> None:
    assert report.overlap((0, 0, 2, 2), (1, 1, 3, 3)) and not report.overlap((0, 0, 2, 2), (2, 0, 3, 3))


def test_missing_peers_are_reported_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed.ops.adam", "torchao.optim", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    found, missing = contenders.peers()
    assert found == []
    assert set(missing) == {
        "DeepSpeedCPUAdam", "torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8", "bitsandbytes AdamW8bit",
    }  # fmt: skip


# Runs -----------------------------------------------------------------------------------------------------------------

RUN = [
    *("--quick", "--only", "adamw fp32", "--sizes", "8192", "2x64", "--threads", "1", "--rounds", "2"),
    *("--backend", "reference", "--name", "Some CPU"),
]


SPREAD = {"median", "q1", "q3", "n"}


def test_the_tool_starts_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_cpu.py"), "--sizes", "lots", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "OPTGEN_ISA"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: 'lots' is no size"), done.stdout + done.stderr


def test_a_run_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    assert bench_cpu.main([*RUN, "--out", str(tmp_path)]) == 0
    path = tmp_path / "cpu-some-cpu.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"cpu", "vectors", "code_path", "cores", "date", "torch", "compiler", "packages"} <= set(data["machine"])
    assert data["machine"]["torch"] == torch.__version__ and data["rounds"] == 2 and data["backend"] == "reference"
    large, small = data["sections"]
    assert (large["size"], large["elements"], large["threads"]) == ("8192", 8192, 1)
    assert (small["size"], small["tensors"], small["whole_step"]) == ("2x64", 2, True)
    for section in (large, small):
        base, ours = section["rows"]
        assert (base["name"], ours["name"]) == (BASE, "AdamW fp32") and not section["left_out"]
        assert set(ours["speed"]) == SPREAD and ours["speed"]["n"] == 2 and "speed" not in base
        assert ours["bytes_per_parameter"] == 28 and ours["ns_per_parameter"]["q1"] > 0
    assert len(data["targets"]) == len(race.TARGETS)
    assert {t["verdict"] for t in data["targets"]} <= {
        "not measured", "not promised without avx2", "not promised without avx512f"
    }  # fmt: skip
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "## 8,192 parameters" in text and "## 2 tensors of 64, 1 thread" in text and "| **" not in text
    if native.compiler():
        assert [c["streams"] for c in large["ceilings"]] == ["changed 3 x 4 B, read 4 B"]
        assert set(large["rows"][0]["share_of_ceiling"]) == SPREAD and small["ceilings"] == []
        picture = path.with_suffix(".png")
        assert f"({picture.name})" in text and picture.read_bytes().startswith(b"\x89PNG")
    for written in (path.read_text(encoding="utf-8"), text):
        assert str(tmp_path) not in written and str(ROOT) not in written
        assert not re.search(r"(?<![\w/])/(?:home|usr|root|tmp|work)\b", written)


def test_strict_fails_where_a_target_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An unreachable target over a size that is measured here; without --strict it is only printed."""
    monkeypatch.setattr(race, "TARGETS", (race.Target("AdamW fp32", "2x64", 1, 1e9),))
    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    given = [*(word for word in RUN if word != "8192"), "--out", str(tmp_path)]
    assert bench_cpu.main(given) == 0
    assert bench_cpu.main([*given, "--strict"]) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--sizes", "lots"], "is no size"),
        (["--threads", "0"], "--threads"),
        (["--rounds", "-1"], "--rounds"),
        (["--only", "nobody"], "no contender here has nobody in its name"),
    ],
)
def test_wrong_calls_are_refused(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPTGEN_ISA", raising=False)
    assert bench_cpu.main([*given, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_code_path_from_outside_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTGEN_ISA", "portable")
    assert bench_cpu.main(["--out", str(tmp_path)]) == 2
    assert "OPTGEN_ISA is set" in capsys.readouterr().err


def test_as_many_threads_as_there_are() -> None:
    assert bench_cpu.default_threads(2) == [1, 2] and bench_cpu.default_threads(1) == [1]
    assert bench_cpu.default_threads(16) == [1, 2, 16]


# One kernel by itself -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
def test_one_kernel_beside_its_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_kernel.main(["--optimizer", "SGD", "--numel", "8192", "--rounds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {row["variant"] for row in rows}
    assert {"as it is", "nothing fetched", "tiles of 1024", "tiles of 2048", "tiles of 4096"} <= found
    assert all(0 < row["least"] <= row["median"] for row in rows)


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
def test_a_kernel_alone_is_one_of_a_single_stage() -> None:
    with pytest.raises(SystemExit, match="LAMB takes several stages"):
        cpu_kernel.main(["--optimizer", "LAMB", "--numel", "8192"])
