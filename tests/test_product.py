"""The product of rules and plans: every cell compiles, its kernel is its reference bit for bit, and keeps its bound.

Daily: rules (`harness.daily`) under the default plan in bf16, and under all their further flags in other dtypes in turn
(AdamW in all), every plan under AdamW, and a sample of the rest, drawn by OPTGEN_SAMPLE_SEED (printed at the end of the
run).  The whole product is run by tools/test_full.py.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.lang import hyper, nonneg, optimizer, sqrt, state
from optgen.lang import sign as sign_of
from optgen.runtime.records.keys import step_key
from optgen.verify.intervals import FAST, STRICT
from tests import harness, product
from tests.product import DEFAULT, PARAMS, PLANS, SPECS, Cell, Run, settings_of

SAMPLED = 8


def daily_cells() -> list[Cell]:
    def draws(spec: str, flags: Any = ()) -> bool:
        return bool(harness.spec_of(spec).trace(dict(flags)).draws)  # what draws is in test_draws.py

    rules = [s for s in SPECS if not draws(s)]
    cells = [Cell(s, DEFAULT) for s in rules]
    further = [(s, f) for s in rules for f in settings_of(s)[1:] or [()] if not draws(s, f)]
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


def test_every_rule_fits_every_plan() -> None:
    """The product has no holes: a plan refused by the lint would be missing from all tests above."""
    refused = {(s, p): product.refusal(s, p) for s in SPECS for p in PLANS if product.refusal(s, p)}
    assert not refused


@optimizer(cite="none", name="Hostile")
def hostile(
    p,
    g,
    t,
    first=state(),
    block=state(nonneg),
    *,
    start=hyper(0.9, ge=0, lt=1),
    lane=hyper(1e-2, ge=0),
    origin=hyper(1e-8, gt=0),
):
    """A rule whose names are those that generated code uses itself."""
    b = 1 - start**t
    count = lane / b
    at = 1 - start
    live = start * first
    index = live + at * g
    first = index
    sign = sign_of(g)
    get = at * g * g
    block = start * block + get
    where = sqrt(block)
    torch = where + origin
    values = first / torch
    p = p - count * values * sign * sign
    return p, first, block


@pytest.mark.parametrize("maths", ["strict", "fast"])
def test_an_author_may_use_any_name(maths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by test_fast_maths...[adagrad]: a host scalar `start` was overwritten by the kernel's own variable."""
    monkeypatch.setattr(product, "spec_of", lambda name: hostile)
    built = product.build(Cell("hostile", DEFAULT))
    pair = harness.Pair(built.spec, built.case, tmp_path, maths)
    draw = torch.Generator().manual_seed(0)
    for shape in ((700,), (5, 70)):
        run = Run(built, torch.randn(shape, generator=draw))
        for _ in range(3):
            g = torch.randn(shape, generator=draw).bfloat16()
            fast, model = run.copy(), FAST if maths == "fast" else STRICT
            inside, exact = run.enclosed(model), run.oracle(g)
            pair.run_triton(fast.buffers, g, run.steps + 1, step_key(0, run.steps + 1), run.stream, **run.hypers)
            after = fast.decoded()
            report = product.differential.compare(after, built.enclose(inside, g, run.options, kept=after), exact)
            assert report.ok, [report.worst[name] for name in report.broken]
            run.step(g)
            assert maths == "fast" or product.same_bits(run.buffers, fast.buffers)
