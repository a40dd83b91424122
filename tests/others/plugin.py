"""A plugin of pytest, in the process of a suite: installs the package's names, leaves tests out, writes outcomes."""

import importlib
import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

package: Any = importlib.import_module(os.environ["OPTGEN_OTHERS_MODULE"])
suite = next(suite for suite in package.SUITES if suite.name == os.environ["OPTGEN_OTHERS_SUITE"])
outcomes: dict[str, str] = {}
RANK, OUTCOMES = int(os.environ["OPTGEN_OTHERS_RANK"]), os.environ["OPTGEN_OTHERS_OUTCOMES"]
if suite.ranks > 1:
    import torch.distributed as dist

    meeting = f"file://{OUTCOMES}.store"
    dist.init_process_group("gloo", meeting, timedelta(minutes=2), world_size=suite.ranks, rank=RANK)
if hasattr(package, "install"):
    package.install(suite.plan)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if not any(re.search(pattern, item.nodeid) for pattern in suite.left_out)]
    outcomes.update((item.nodeid, "left out") for item in items if item not in set(kept))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in outcomes])
    items[:] = kept


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        outcomes[report.nodeid] = "failed"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.when == "call" and outcomes.get(report.nodeid) != "failed":
        outcomes[report.nodeid] = report.outcome
    elif report.skipped:
        outcomes[report.nodeid] = "skipped"
    if report.skipped and hasattr(report, "wasxfail"):
        outcomes[report.nodeid] = "passed"  # as the package expects


def pytest_sessionfinish() -> None:
    Path(f"{OUTCOMES}.{RANK}").write_text(json.dumps(outcomes), encoding="utf-8")
