"""Limits of classes and functions: what is larger is split."""

import ast
from collections.abc import Iterator
from pathlib import Path

from radon.complexity import cc_visit
from radon.visitors import Function

ROOT = Path(__file__).resolve().parent.parent

CLASS_LINES, FUNCTION_LINES, COMPLEXITY = 300, 80, 15

COMPLEX = {
    "driver/record_text.py: _stage",
    "lower/program.py: lower_rule",
    "passes/convert.py: Converter.__call__",
    "passes/cut.py: Cutter.choices",
    "passes/cut.py: Names.__init__",
}
"""The functions above COMPLEXITY: what reads worse when it is split. The list only shrinks."""


def longer() -> Iterator[str]:
    for path in sorted((ROOT / "optgen").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if (node.end_lineno or 0) - node.lineno + 1 > limit:
                yield f"{path.relative_to(ROOT).as_posix()}: {node.name}"


def test_no_class_and_no_function_is_long() -> None:
    assert not list(longer())


def complex_functions() -> Iterator[str]:
    """Yield the functions and methods above COMPLEXITY, by radon's cyclomatic complexity, as "path: name"."""
    for path in sorted((ROOT / "optgen").rglob("*.py")):
        for block in cc_visit(path.read_text(encoding="utf-8")):
            if isinstance(block, Function) and block.complexity > COMPLEXITY:
                name = f"{block.classname}.{block.name}" if block.classname else block.name
                yield f"{path.relative_to(ROOT / 'optgen').as_posix()}: {name}"


def test_no_function_is_complex() -> None:
    assert set(complex_functions()) == COMPLEX


LINES = {
    "": 979, "backends": 2657, "base": 583, "convert": 663, "driver": 4652, "formats": 3181, "integrations": 277,
    "ir": 956, "lang": 4539, "lower": 359, "ops": 650, "optim": 44, "passes": 1988, "runtime": 1398,
    "runtime/checkpoint": 1678, "runtime/cpu": 956, "runtime/gpu": 3098, "runtime/layout": 1854,
    "runtime/modes": 1524, "runtime/options": 886, "runtime/records": 2124, "runtime/reference": 1217,
    "runtime/states": 727, "runtime/step": 2025, "runtime/work": 1606, "verify": 1565, "tests": 35075,
    "tools": 5796, "docs": 4527,
}  # fmt: skip
"""The most lines of a room of optgen/, of tests/, tools/ and docs/, with docstrings and comments; they only go down."""


def room_of(path: Path) -> str:
    """Return the room of a module: its folder in optgen/, or in optgen/runtime/; tests; tools; docs."""
    top, *folders = path.relative_to(ROOT).parts[:-1]
    return top if top != "optgen" else "/".join(folders[: 2 if folders[:1] == ["runtime"] else 1])


def test_no_room_grows() -> None:
    found: dict[str, int] = {}
    for path in (p for top in ("optgen", "tests", "tools", "docs") for p in (ROOT / top).rglob("*.py")):
        room = room_of(path)
        found[room] = found.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    assert {room: lines for room, lines in found.items() if lines > LINES[room]} == {}
    assert found.keys() == LINES.keys()
