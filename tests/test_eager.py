"""The eager reference: the tiles of a rule and the codecs of a plan in strict maths, run as torch."""

import ast
from pathlib import Path

import pytest

from optgen._ready import folder
from optgen.driver import triton_text
from optgen.runtime.reference import tile
from tests import product

ROOT = Path(__file__).parents[1]

@pytest.mark.parametrize("name", ["adamw", "came", "soap"])
def test_tiles_are_those_of_strict_kernels(name: str) -> None:
    """The eager reference runs the text of a kernel: each of its functions stands in the kernels' module, too."""
    spec = product.spec_of(name)
    texts = triton_text.tile_text(spec), triton_text.rule_text(spec, "strict")
    ours, theirs = ({x.name: ast.dump(x) for x in ast.parse(t).body if isinstance(x, ast.FunctionDef)} for t in texts)
    assert ours and ours.items() <= theirs.items()
    assert texts[0] == (folder(name) / triton_text.STRICT).read_text()


def test_what_a_tile_may_not_call_is_named() -> None:
    with pytest.raises(AttributeError, match=r"tl\.cos .* optgen/runtime/reference/tile\.py"):
        tile.run("import triton.language as tl\n\nx = tl.cos", "mine", "mine.py")
