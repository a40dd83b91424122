"""The eager reference: one text per rule and one per plan, put together where they meet."""

import random
from pathlib import Path

import pytest
import torch

from optgen.backends import host, reference
from optgen.driver import eager_text
from optgen.ops.prims import CALLS
from tests import product
from tests.harness import Pair
from tests.product import Cell, Run, build

ROOT = Path(__file__).parents[1]
CELLS = [
    Cell("lion", "int8_split24"), Cell("adamw", "int4_split24"), Cell("adamw", "int8_split24", "float16"),
    Cell("adamw", "bf16_sr"), Cell("adamw", "flashoptim"), Cell("lookahead_adamw", "int8_split24"),
]  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rule_under_a_plan_has_the_bits_of_both_written_out_together(cell: Cell, tmp_path: Path) -> None:
    """Three steps beside one function into which lowering put rule, codecs and random words: every stored byte."""
    built = build(cell)
    pair = Pair(built.spec, built.compiled.strict, tmp_path)
    draw = random.Random(5)
    torch.manual_seed(5)
    for shape in ((8, 64), (5, 70), (33,)):
        run = Run(built, torch.randn(shape))
        other = {name: x.clone() for name, x in run.buffers.items()}
        for step in range(1, 4):
            g = (torch.randn(shape) * 10.0 ** draw.randint(-3, 1)).to(getattr(torch, cell.param))
            key = product.step_key(run.seed, step)
            pair.run_reference(other, g, step, key, run.stream, **run.hypers)
            run.step(g)
            pairs = ((name, x.view(torch.uint8), run.buffers[name].view(torch.uint8)) for name, x in other.items())
            different = [name for name, x, y in pairs if not torch.equal(x, y)]
            assert not different, f"{different} at step {step} of {shape}"


def test_texts_are_as_long_as_what_they_say() -> None:
    """A rule is written once for all plans, a plan once for all rules: no text of a pair is left."""
    assert not {*host.HELPERS} & {*reference.HELPERS, *CALLS}  # imported by one module
    for name, limit in (("lion", 60), ("adamw", 150), ("came", 300)):
        _, lines = eager_text.rule_lines(product.spec_of(name))
        assert len(lines) <= limit
        assert "\n".join(lines) in (ROOT / f"generated/{name}/__init__.py").read_text()
    assert not list((ROOT / "generated").glob("*/*/reference.py"))
    rules = [len(eager_text.rule_text(product.spec_of(name))) for name in product.SPECS]
    assert sum(rules) < 4_300 * len(rules)  # 4,228; a tenth of it is adafactor_paper's, of 16 settings
    plans = sum(file.stat().st_size for file in (ROOT / "optgen/plans").glob("*/__init__.py"))
    assert plans < 138_000  # 2,200 of it keep infinities, and NaNs in their elements
