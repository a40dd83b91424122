"""The cost of compiled kernels, without a GPU: no spills, full-width accesses, and no more instructions than before.

The kernels of `tools/kernel_stats.py --chosen` and two of `--watched` are compiled for one target every day, all of
them for all targets and by the oldest Triton in the slow tests; in processes of their own (this one interprets Triton),
and read back from their machine code.  Counts belong to a Triton version: they are compared with
tests/baselines/kernel_stats.json where it has that version.  After a change that is meant to move them: `python
tools/kernel_stats.py --update`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import roofline

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
BASELINES = json.loads((ROOT / "tests" / "baselines" / "kernel_stats.json").read_text(encoding="utf-8"))
SLACK = 1.03  # the compilers' own scheduling moves a count by 1 to 2 %
# Elementwise tensors of a chosen kernel that are read and written, by width of an access: 8 elements a thread.
ACCESSES = {
    "adamw.fp32": ({128: 8}, {128: 6}),
    "lion.int8": ({128: 2, 64: 2}, {128: 1, 64: 2}),
    "sgd.int8": ({128: 2, 64: 2}, {128: 1, 64: 2}),
    "adamw.int8_split24": (adamw := ({128: 2, 64: 3}, {128: 1, 64: 3})),
    "adamw.int8_rn_split24": adamw,
}
SCALES = 16  # bits: a block's scale or header, the only narrow access

OLDEST = Path(sys.prefix) / "oldest"  # the oldest Triton that is supported, by `make setup`


def counted(env: dict[str, str], *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the counts of kernels by (kernel, target)."""
    command = [sys.executable, str(ROOT / "tools" / "kernel_stats.py"), "--json", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["kernel"], row["target"]): row for row in rows}


def assert_within_budget(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    """No stack, and on an H200 no pipe is busy for more of the time that memory takes than is said in roofline.py."""
    for (kernel, target), row in found.items():
        assert row["stack"] == 0 or kernel in roofline.SPILLING, (kernel, target)
        if target == roofline.TARGET and row["cost"]:
            assert row["bytes"] >= 2, kernel  # the gradient
            busy = roofline.Cost(**row["cost"]).busy(roofline.CARDS["H200"], row["bytes"])
            assert 0 < max(busy.values()) <= max(roofline.MOST, SLACK * roofline.KNOWN.get(kernel, 0)), (kernel, busy)


def faults(row: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a kernel.

    A chosen one has registers for 32 programs of one warp, the most that a processor of 64 Ki registers holds, and
    converts no more than a few integers of each block of 64 by the slow unit.  Random bits of f16 weights went through
    shared memory where two ways of rounding read them: Triton makes no operation twice for a value of two readers.
    """
    kernel, elements, kinds = row["kernel"], row["elements_per_thread"], row["classes"]
    base = BASELINES.get(row["triton"], {}).get(f"{kernel} {row['target']}")
    if base and row["per_element"] > base["per_element"] * SLACK:
        yield f"{row['per_element']} instructions per element, not {base['per_element']}"
    if row["stack"] and kernel not in roofline.SPILLING:
        yield f"{row['stack']} bytes of stack"
    chosen = next((name for name in ACCESSES if kernel.startswith(name)), "")
    if chosen and row["shared"]:
        yield "shared memory"
    if not chosen or kernel.endswith("float16"):
        return
    if {"local", "spill", "barrier"} & kinds.keys():
        yield "local memory, or barriers"
    if row["registers"] > 64 and row["target"].startswith("sm_"):
        yield f"{row['registers']} registers"
    for kind, wanted in zip(("loads", "stores"), ACCESSES[chosen], strict=True):
        widths = {int(bits): 8 * count / elements for bits, count in row[kind].items() if int(bits) != SCALES}
        if widths != wanted:
            yield f"{kind} of {widths} bits"
    if kinds.get("convert", 0) / elements > 0.5:
        yield "conversions by the slow unit"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("--target", "sm_90", "fp32", "int8_split24", "int8_rn", "bf16_sr"), ""),
        pytest.param((), "", marks=pytest.mark.slow),
        # Its passes over layouts differ: values once went through shared memory there, and eight elements outside
        # blocks shared no hash (AdamW bf16_sr took 62.7), nowhere else.
        pytest.param(("--target", "sm_90", "int8", "bf16_sr"), str(OLDEST), marks=[
            pytest.mark.slow, pytest.mark.skipif(not OLDEST.is_dir(), reason="the oldest Triton is not installed")]),
    ],
    ids=("daily", "all", "oldest"),
)  # fmt: skip
def test_kernels_cost_no_more_than_before(words: tuple[str, ...], path: str, compiling: dict[str, str]) -> None:
    env = {**compiling, "PYTHONPATH": os.pathsep.join(filter(None, [path, compiling.get("PYTHONPATH", "")]))}
    found = counted(env, "--chosen", "--watched", *words)
    known = BASELINES.get(next(iter(found.values()))["triton"], {})
    wanted = {x for x in known if not words or (x.endswith(words[1]) and any(name in x for name in words[2:]))}
    assert not known or {" ".join(key) for key in found} == wanted
    assert {" ".join(key): wrong for key, row in found.items() if (wrong := [*faults(row)])} == {}
    if not path:  # the registers and schedules of the newest are what the budget is of
        assert_within_budget(found)
