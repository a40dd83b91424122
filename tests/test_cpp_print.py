"""The C++ backend beside the primitive table and its headers."""

import re
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

HEADERS = sorted(native.HEADERS.glob("simd_*.h"))
HOST_ONLY = {"pow", "exp", "log"}
BY_STATEMENT = {"block_max", "block_min"}  # printed as accumulations, not as expressions
FUNCTION = re.compile(r"^(?:template <[^>]*> )?inline (\w+) ([\w]+|operator\S+)\((.*?)\) ?{", re.M)


def signatures(path: Path) -> set[str]:
    """result name(types of operands) of what a header defines, but for helpers of its own registers."""
    out = set()
    for result, name, operands in FUNCTION.findall(path.read_text(encoding="utf-8")):
        types = [re.sub(r"\b\w+$", "", o.strip()).strip() or o.strip() for o in operands.split(",")]
        text = f"{result} {name}({', '.join(types)})"
        if "__m" not in text and "T *" not in text:
            out.add(re.sub(r"\bint\b", "int", text))
    return out


def test_every_core_primitive_is_spelled() -> None:
    core = {name for name, row in PRIMS.items() if row.core}
    assert core - HOST_ONLY - BY_STATEMENT - MATRIX_OPS - set(REDUCTIONS) <= set(cpp.SPELL)


def test_all_headers_define_the_same() -> None:
    assert len(HEADERS) == 3
    first, *rest = (signatures(path) for path in HEADERS)
    assert len(first) > 60
    for other in rest:
        assert {s.replace("Op", "") for s in first} == {s.replace("Op", "") for s in other}


def test_subnormals_survive_a_kernel(tmp_path: Path) -> None:
    """-ffast-math, linked in, would flush them to zero in the whole process."""
    if native.compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert not any("fast-math" in flag for flag in native.FLAGS)
    pair = harness.strict("sgd", "fp32", tmp_path, "float32")
    harness.compiled(pair.source, "float32")
    assert float(torch.tensor(1e-40) * torch.tensor(1.0)) > 0


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-45, 3.4028235e38, -0.0, float("inf"), 2.0**-149, 16777217.0])
def test_a_constant_is_its_exact_f32_value(value: float) -> None:
    text = cpp.literal(value)
    if text.endswith("INFINITY"):
        assert value == float("inf")
        return
    wanted = float(torch.tensor(value, dtype=torch.float32))
    assert text.endswith("f") and float(torch.tensor(float(text[:-1]), dtype=torch.float32)) == wanted
    assert str(wanted)[0] == text[0]  # the sign of zero, too


def test_blocks_load_no_value_that_only_their_reductions_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that both the maximum and the minimum are of has a name, and is kept nowhere."""
    monkeypatch.setattr(words, "block_bottom", lambda x, block: block_min(x + NAN_LAST, block))
    text = cpp_text.codec_text(Plan("shares", nonneg=LogMinMax(8, 32)), "strict")
    assert "pattern_add" in text and "pattern_add_kept" not in text
