"""A pytest plugin for the processes of tools/gpu_check.py that run checks.

The processes of a part share its tests: each test is taken by the first process that claims it, and its outcome is
written to a file before the next test begins. A run that is killed loses the tests under way and no others.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.driver.project import DEFAULT_PLANS
from tools.bench.race import end_with_parent
from tools.gpu_check import BROKEN, outcomes

HUGE = 40 * 2**30
"""Bytes of free memory above which tensors of more than 2^31 elements are checked too (20 GiB)."""

OUTCOMES, CLAIMS, PART = (os.environ.get(f"OPTGEN_CHECK_{name}", "") for name in ("OUTCOMES", "CLAIMS", "PART"))


def part_of(item: pytest.Item) -> str:
    """Return the part of a run that a test belongs to: bits, modes, common or others."""
    name, cell = getattr(item, "originalname", ""), getattr(item, "callspec", None) and item.callspec.params.get("cell")
    if name.startswith("test_replayed") or "test_offload" in item.nodeid:
        return "modes"
    if cell is None or cell.flags or cell.param == "float16" or cell.spec not in item.module.FIRST:
        return "others"
    return "bits" if name.startswith("test_strict") else "common"


def order(item: Any) -> tuple[int, bool, int]:
    """Return what tests are sorted by: what is usual comes first, and of the others any beginning is a sample."""
    part = part_of(item)
    usual = part in ("bits", "common") and item.callspec.params["cell"].plan in DEFAULT_PLANS
    drawn = zlib.crc32(item.nodeid.encode()) if part == "others" else 0
    return ("bits", "modes", "common", "others").index(part), not usual, drawn


def pytest_configure() -> None:
    end_with_parent()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = outcomes(Path(OUTCOMES))
    device = torch.cuda.is_available() and os.environ["OPTGEN_TEST_DEVICE"] == "cuda"
    small = device and torch.cuda.mem_get_info()[0] < HUGE
    left = [i for i in items if i.nodeid not in done and PART in ("checks", part_of(i))]
    items[:] = sorted((i for i in left if not (small and "2_to_the_31" in i.name)), key=order)
    Path(CLAIMS, f"count-{os.getpid()}").write_text(str(len(items)), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out a test that another process has claimed."""
    try:
        with Path(CLAIMS, f"claim-{zlib.crc32(item.nodeid.encode()):08x}").open("x", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {item.nodeid}")
    except FileExistsError:
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the outcome of a test when it is known; end the process where the device is lost with it."""
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        row = {"test": item.nodeid, "outcome": report.outcome, "seconds": round(call.duration, 1)}
        row |= {"text": report.longreprtext[-3000:]} if report.outcome == "failed" else {}
        with Path(OUTCOMES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")  # one short write at the end of the file, which processes may share
        if report.outcome == "failed" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(BROKEN)
    return report
