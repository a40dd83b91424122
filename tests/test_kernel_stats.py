"""The cost of compiled kernels, without a GPU: no spills, full-width accesses, and no more instructions than before.

The kernels of `tools/kernel_stats.py --chosen` are compiled for one target every day and for three more in the slow
tests, and those of `--watched` for one, in processes of their own (this one interprets Triton), and read back from
their machine code.  Counts belong to a Triton
version: they are compared with tests/baselines/kernel_stats.json where it has that version.  After a change that is
meant to move them: `python tools/kernel_stats.py --update`.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optgen.runtime.cpu import cache
from tools import roofline

pytest.importorskip("triton")

Counted = Callable[[tuple[str, ...]], dict[tuple[str, str], dict[str, Any]]]
ROOT = Path(__file__).parents[1]
BASELINES = json.loads((ROOT / "tests" / "baselines" / "kernel_stats.json").read_text(encoding="utf-8"))
SLACK = 1.03  # the compilers' own scheduling moves a count by 1 to 2 %
DAILY, MORE = ("sm_90",), ("gfx942", "sm_80", "sm_100")
# (kernel, target) -> most instructions per element, from what memory lets through at the target's clock rate.
LIMITS = {
    ("adamw.int8_split24", "sm_90"): 66,
    ("adamw.int8_rn_split24", "sm_90"): 50,
    ("adamw.int8_rn_split24", "sm_100"): 43,
    ("adamw.int8_rn_split24", "gfx942"): 38,
    ("lion.int8_split24", "sm_90"): 46,
    ("lion.int8_rn_split24", "sm_90"): 38,
    ("sgd.int8_split24", "sm_90"): 42,
    ("sgd.int8_rn_split24", "sm_90"): 34,
}
# Elementwise tensors of a kernel that are read and written, by width of an access: 8 elements a thread.
READS = {
    "adamw.int8": {128: 2, 64: 3},
    "lion.int8": {128: 2, 64: 2},
    "sgd.int8": {128: 2, 64: 2},
    "adamw.fp32": {128: 8},
}
WRITES = {
    "adamw.int8": {128: 1, 64: 3},
    "lion.int8": {128: 1, 64: 2},
    "sgd.int8": {128: 1, 64: 2},
    "adamw.fp32": {128: 6},
}
SCALES = 16  # bits: a block's scale or header, the only narrow access


OLDEST = Path(sys.prefix) / "oldest"  # the oldest Triton that is supported, by `make setup`
WATCHED = ("bf16_sr", "int8_split24.float16", "bnb8", "torchao4", "lpmm4", "int5_factored_split24")


@pytest.fixture(scope="session", params=[DAILY, pytest.param(MORE, marks=pytest.mark.slow)], ids=" ".join)
def targets(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="session")
def counted(compiling: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Return what gives the counts of each (kernel, target) for some targets, made once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(targets: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Any]]:
        path = folder / f"kernel_stats {' '.join(targets)}"
        with cache.alone(path):
            if not path.exists():
                asked = [word for target in targets for word in ("--target", target)]
                command = [sys.executable, str(ROOT / "tools" / "kernel_stats.py"), "--chosen", "--watched", "--json"]
                done = subprocess.run([*command, *asked], env=compiling, capture_output=True, text=True, cwd=ROOT)
                assert done.stdout, done.stderr
                path.write_text(done.stdout, encoding="utf-8")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {(row["kernel"], row["target"]): row for row in rows}

    return made


@pytest.fixture
def every(targets: tuple[str, ...], counted: Counted) -> dict[tuple[str, str], dict[str, Any]]:
    return counted(targets)


@pytest.fixture
def stats(every: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The counts of the chosen kernels."""
    return {key: row for key, row in every.items() if format_of(key[0]) not in WATCHED}


@pytest.fixture
def watched(counted: Counted) -> dict[tuple[str, str], dict[str, Any]]:
    """Sweeps of other formats, on one target."""
    return {key: row for key, row in counted(DAILY).items() if format_of(key[0]) in WATCHED}


def format_of(kernel: str) -> str:
    """Its plan, and the weights' dtype where that is said; not which of several sweeps it is."""
    return re.sub(r"^[^.]*\.|\.\d+$", "", kernel)


def family(kernel: str) -> str:
    return next(name for name in READS if kernel.startswith(name))


def assert_within_budget(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """No stack, and on an H200 no pipe is busy for more of the time that memory takes than is said in roofline.py."""
    for (kernel, target), row in found.items():
        assert row["stack"] == 0 or kernel in roofline.SPILLING, (kernel, target)
        if target == roofline.TARGET and row["cost"]:
            assert row["bytes"] >= 2, kernel  # the gradient
            busy = roofline.Cost(**row["cost"]).busy(roofline.CARDS["H200"], row["bytes"])
            assert 0 < max(busy.values()) <= max(roofline.MOST, SLACK * roofline.KNOWN.get(kernel, 0)), (kernel, busy)


def test_time_is_that_of_the_busiest_pipe_or_of_what_waits_for_memory() -> None:
    """Eight rounds of a load of four numbers and a function of each; one instruction before, one store behind."""
    functions = [SimpleNamespace(opcode="MUFU.EX2", operands=f"R{8 + k}, R{4 + k}") for k in range(4)]
    names = "IADD3 R2,R2,R3,RZ", "LDG.E.128 R4,desc[UR4][R2.64]", "FADD R12,R12,R11", "BRA .L_x_0", "STG.E [R2.64],R12"
    add, load, *rest = (SimpleNamespace(opcode=a, operands=b) for a, b in map(str.split, names))
    code = [add, load, *functions, *rest, SimpleNamespace(opcode="EXIT", operands="")]
    cost = roofline.cost(code, [range(1, 8)], range(1, 8), 8, 8.0, (1, 2048), 16, 1)
    assert cost.launched == round((8 * 7 + 3) / 64, 2)
    pipes = {"issue": 8 * 7 + 3, "ALU": 2, "LSU": 8 * 16 + 4, "XU": 8 * 4 * 8, "FMA": 8}
    assert cost.pipes == {name: round(cycles / 64, 3) for name, cycles in pipes.items()}
    assert 8 * (800 + 3 * 8 + 24) <= cost.alone <= 8 * (800 + 3 * 8 + 24 + 16)
    card = roofline.Card(processors=1, clock=1e9, bandwidth=1.28e11)  # a byte for each lane of a scheduler and cycle
    assert cost.busy(card, 4.0)["XU"] == 1.0 and cost.share(card, 2.0) == 0.5
    one, many = (cost.share(card, 4.0, [(n, 2048)]) for n in (1, 32))
    assert one == pytest.approx(2048 * 4 / 1.28e11 * 1e9 / cost.alone) and many == pytest.approx(32 * one)


def test_nothing_spills_and_no_value_goes_through_shared_memory(stats: dict[tuple[str, str], dict[str, Any]]) -> None:
    for key, row in stats.items():
        assert row["stack"] == 0, key
        assert row["shared"] == 0, key
        for kind in ("local", "spill", "barrier"):
            assert kind not in row["classes"], (key, kind)


def test_registers_leave_room_for_as_many_programs_as_a_processor_holds(
    stats: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """64 Ki registers per processor and 32 programs of one warp at most."""
    for (kernel, target), row in stats.items():
        assert row["registers"] <= 64 or not target.startswith("sm_"), (kernel, target)


def test_accesses_are_as_wide_as_eight_elements(stats: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (kernel, target), row in stats.items():
        tiles = row["elements_per_thread"] / 8
        for kind, wanted in (("loads", READS), ("stores", WRITES)):
            found = {int(bits): count / tiles for bits, count in row[kind].items() if int(bits) != SCALES}
            assert found == wanted[family(kernel)], (kernel, target, kind)


def test_elements_are_not_converted_by_the_slow_unit(stats: dict[tuple[str, str], dict[str, Any]]) -> None:
    """A few integers per block of 64 are all that is converted."""
    for key, row in stats.items():
        assert row["classes"].get("convert", 0) / row["elements_per_thread"] <= 0.5, key


def test_sweeps_of_other_formats_do_not_spill(watched: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert {format_of(kernel) for kernel, _ in watched} == set(WATCHED)
    assert len(watched) == 8  # the last two have two sweeps
    for (kernel, target), row in watched.items():
        assert row["stack"] == 0 or kernel in roofline.SPILLING, (kernel, target)


def test_random_bits_of_f16_weights_do_not_go_through_shared_memory(
    watched: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """They did where two ways of rounding read them: Triton makes no operation twice for a value of two readers."""
    (row,) = (row for (kernel, _), row in watched.items() if format_of(kernel).endswith("float16"))
    assert row["shared"] == 0


def test_instructions_stay_within_the_baseline(
    targets: tuple[str, ...], every: dict[tuple[str, str], dict[str, Any]]
) -> None:
    version = next(iter(every.values()))["triton"]
    if version not in BASELINES:
        pytest.skip(f"no baseline of Triton {version}: python tools/kernel_stats.py --update")
    base = BASELINES[version]
    assert {f"{kernel} {target}" for kernel, target in every} == {key for key in base if key.endswith(targets)}
    grown = {
        key: (row["per_element"], base[" ".join(key)]["per_element"])
        for key, row in every.items()
        if row["per_element"] > base[" ".join(key)]["per_element"] * SLACK
    }
    assert not grown


def test_no_pipe_takes_longer_than_memory(every: dict[tuple[str, str], dict[str, Any]]) -> None:
    assert_within_budget(every)


def test_instructions_stay_within_the_roofline(
    targets: tuple[str, ...], stats: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for (kernel, target), most in LIMITS.items():
        assert target not in targets or stats[kernel, target]["per_element"] <= most, (kernel, target)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="the oldest Triton is not installed: make setup")
def test_the_oldest_triton_makes_no_more_of_them(compiling: dict[str, str]) -> None:
    """Its passes over layouts differ: values once went through shared memory there, and eight elements outside blocks
    shared no hash (AdamW bf16_sr took 62.7), nowhere else."""
    asked = ["--chosen", "--watched", "--json", "--target", "sm_90", "int8", "bf16_sr"]
    command = [sys.executable, str(ROOT / "tools" / "kernel_stats.py"), *asked]
    env = {**compiling, "PYTHONPATH": os.pathsep.join([str(OLDEST), compiling.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    others = {"adamw.bf16_sr", "adamw.int8_split24.float16"}
    assert {row["kernel"] for row in rows} == {kernel for kernel, _ in LIMITS} | others
    for row in rows:
        before = BASELINES[row["triton"]][f"{row['kernel']} sm_90"]
        most = LIMITS.get((row["kernel"], "sm_90"), math.inf)
        assert row["per_element"] <= min(before["per_element"] * SLACK, most), row["kernel"]
        assert (row["stack"], row["shared"]) == (0, 0), row["kernel"]
        assert row["registers"] <= max(64, before["registers"]), row["kernel"]
