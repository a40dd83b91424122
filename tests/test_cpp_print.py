"""The C++ backend beside the primitive table."""

from pathlib import Path

import pytest
import torch

from optgen.backends import cpp
from optgen.driver import cpp_text
from optgen.formats import LogMinMax, Plan, words
from optgen.lang.values import block_min
from optgen.ops.dtypes import NAN_LAST
from optgen.ops.prims import MATRIX_OPS, PRIMS, REDUCTIONS
from optgen.runtime.cpu import native
from tests import harness

HOST_ONLY = {"pow", "exp", "log"}
BY_STATEMENT = {"block_max", "block_min"}  # printed as accumulations, not as expressions


def test_every_core_primitive_is_spelled() -> None:
    core = {name for name, row in PRIMS.items() if row.core}
    assert core - HOST_ONLY - BY_STATEMENT - MATRIX_OPS - set(REDUCTIONS) <= set(cpp.SPELL)


def test_subnormals_survive_a_kernel(tmp_path: Path) -> None:
    """-ffast-math, linked in, would flush them to zero in the whole process."""
    if native.compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert not any("fast-math" in flag for flag in native.FLAGS)
    pair = harness.strict("sgd", "fp32", tmp_path, "float32")
    harness.compiled(pair.source, "float32")
    assert float(torch.tensor(1e-40) * torch.tensor(1.0)) > 0


def test_blocks_load_no_value_that_only_their_reductions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that both the maximum and the minimum are of has a name, and is kept nowhere."""
    monkeypatch.setattr(words, "block_bottom", lambda x, block: block_min(x + NAN_LAST, block))
    text = cpp_text.codec_text(Plan("shares", nonneg=LogMinMax(8, 32)), "strict")
    assert "pattern_add" in text and "pattern_add_kept" not in text
