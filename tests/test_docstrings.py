"""The first word of a docstring: an imperative, or a noun with its article."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "optgen"
ROOMS = (
    "base", "ops", "ir", "lang", "formats", "passes", "lower", "verify", "backends", "driver", "convert", "runtime",
)  # fmt: skip
DANGLING = {"What", "Whether", "Of", "That", "Where", "How", "Those"}


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_no_dangling_word(room: str) -> None:
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].rstrip(",:") in DANGLING:
                    found.append(f"{path.name}: {' '.join(words[:8])}")
    assert not found
