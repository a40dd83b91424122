"""The first word of a docstring: an imperative, or a noun with its article."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "base", "ops", "ir", "lang", "formats", "passes", "lower", "verify", "backends", "driver", "convert", "runtime",
    "integrations",
)  # fmt: skip
FILES = {
    **{room: f"optgen/{room}/**/*.py" for room in ROOMS},
    **{folder: f"{folder}/*.py" for folder in ("optgen", "specs", "docs", "docs/tools", "examples", "tools", "tests")},
}
DANGLING = {"What", "Whether", "Of", "That", "Where", "How", "Those"}


@pytest.mark.parametrize("room", FILES)
def test_docstrings_begin_with_no_dangling_word(room: str) -> None:
    found = []
    for path in sorted(ROOT.glob(FILES[room])):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].rstrip(",:") in DANGLING:
                    found.append(f"{path.name}: {' '.join(words[:8])}")
    assert not found
