"""The eager reference: the tiles of a rule and the codecs of a plan in strict maths, run as torch."""

import ast
import random
from pathlib import Path

import pytest
import torch

from optgen.driver import triton_text
from optgen.runtime.reference import tile
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


@pytest.mark.parametrize("name", ["adamw", "came", "soap"])
def test_tiles_are_those_of_strict_kernels(name: str) -> None:
    """The eager reference runs the text of a kernel: each of its functions stands in the kernels' module, too."""
    spec = product.spec_of(name)
    texts = triton_text.tile_text(spec), triton_text.rule_text(spec, "strict")
    ours, theirs = ({x.name: ast.dump(x) for x in ast.parse(t).body if isinstance(x, ast.FunctionDef)} for t in texts)
    assert ours and ours.items() <= theirs.items()
    assert texts[0] == (ROOT / f"generated/{name}/strict.py").read_text()


def test_what_a_tile_may_not_call_is_named() -> None:
    with pytest.raises(AttributeError, match=r"tl\.cos .* optgen/runtime/reference/tile\.py"):
        tile.run("import triton.language as tl\n\nx = tl.cos", "mine", "mine.py")
