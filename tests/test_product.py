"""The product of rules and plans: every cell compiles, its kernel is its reference bit for bit, and keeps its bound.

Daily: rules (`harness.daily`) under the default plan in bf16, and under all their further flags in other dtypes in turn
(AdamW in all), every plan under AdamW, and a sample of the rest, drawn by OPTGEN_SAMPLE_SEED (printed at the end of the
run).  The whole product is in tests/test_whole_product.py.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests import harness, product
from tests.product import DEFAULT, PARAMS, PLANS, SPECS, Cell, settings_of

SAMPLED = 8


def daily_cells() -> list[Cell]:
    cells = [Cell(s, DEFAULT) for s in SPECS]
    further = [(s, f) for s in SPECS for f in settings_of(s)[1:] or [()]]
    cells += [Cell(s, DEFAULT, ("float32", "float16", "bfloat16")[k % 3], f) for k, (s, f) in enumerate(further)]
    cells += [Cell("adamw", DEFAULT, param) for param in PARAMS]
    return list(dict.fromkeys([*cells, *(Cell("adamw", plan) for plan in PLANS)]))


def cells() -> list[Any]:
    daily = daily_cells()
    drawn = product.sample(SAMPLED, int(os.environ["OPTGEN_SAMPLE_SEED"]), besides=daily)
    return [*harness.sampled("cells", daily), *drawn]


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_a_cell_is_right(cell: Cell, tmp_path: Path) -> None:
    """Its kernel is its reference, and each step is within its bound, which is there for every element.

    FlashOptim's scales alone have ranges too narrow to promise anything for gradients of 1e-6.
    """
    for report in product.check(cell, tmp_path):
        assert report.ok, [report.worst[name] for name in report.broken]
        assert report.claimed == 1 or cell.plan == "flashoptim"


@pytest.mark.parametrize("spec", harness.sampled("fits", SPECS))
def test_every_rule_fits_every_plan(spec: str) -> None:
    """The product has no holes: a plan refused by the lint would be missing from all tests above."""
    assert not {p: product.refusal(spec, p) for p in PLANS if product.refusal(spec, p)}
