"""The quick interpreter gives what Triton's own gives, for kernels and for single operations."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from optgen.runtime.records.keys import step_key
from tests import harness, interpreter, product
from tests.product import Cell, Run


@contextmanager
def plain() -> Iterator[None]:
    """Triton's interpreter as it comes; tests/conftest.py has made it quick."""
    here = [(owner, name, getattr(owner, name)) for owner, name, _ in interpreter.originals()]
    for owner, name, value in interpreter.originals():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in here:
            setattr(owner, name, value)


def test_quickened_is_undone_and_done_again() -> None:
    """The other test here compares two interpreters, not one with itself."""
    from triton.language import core

    quick = core.tensor.__init__
    with plain():
        assert core.tensor.__init__ is not quick and core.tensor.__init__.__module__ == core.__name__
    assert core.tensor.__init__ is quick


@pytest.mark.parametrize("cell", [Cell("adamw", "int8_split24"), Cell("lion", "torchao4", "float16")], ids=str)
def test_a_kernel_stores_the_same_bits(cell: Cell, tmp_path: Path) -> None:
    """Random bits, packed codes, tables, blocks that end ragged."""
    built = product.build(cell)
    pair = harness.Pair(built.spec, built.case, tmp_path)
    draw = torch.Generator().manual_seed(0)
    run = Run(built, torch.randn(3, 70, generator=draw))
    for _ in range(2):
        g = torch.randn(3, 70, generator=draw).to(getattr(torch, cell.param))
        twins = [run.copy(), run.copy()]
        key = step_key(0, run.steps + 1)
        pair.run_triton(twins[0].buffers, g, run.steps + 1, key, run.stream, **run.hypers)
        with plain():
            pair.run_triton(twins[1].buffers, g, run.steps + 1, key, run.stream, **run.hypers)
        before = run.copy()
        run.step(g)
        assert product.same_bits(twins[0].buffers, twins[1].buffers)
        assert not product.same_bits(twins[0].buffers, before.buffers)


OLDEST = Path(sys.prefix) / "oldest"  # the oldest Triton that is supported, by `make setup`


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="the oldest Triton is not installed: make setup")
def test_the_oldest_triton_stores_the_same_bits() -> None:
    """Its interpreter is made quick as well."""
    path = os.pathsep.join([str(OLDEST), str(Path(__file__).parents[1])])
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "test_a_kernel"]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
