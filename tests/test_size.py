"""Limits of classes and functions: what is larger is split."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CLASS_LINES, FUNCTION_LINES, COMPLEXITY = 600, 80, 25


def longer() -> Iterator[str]:
    plans = ROOT / "optgen" / "plans"  # generated
    for path in sorted(p for p in (ROOT / "optgen").rglob("*.py") if not p.is_relative_to(plans)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            if (node.end_lineno or 0) - node.lineno + 1 > limit:
                yield f"{path.relative_to(ROOT).as_posix()}: {node.name}"


def test_no_class_and_no_function_is_long() -> None:
    assert not list(longer())


def test_no_function_is_complex() -> None:
    """McCabe's cyclomatic complexity, as ruff counts it."""
    given = ["--select", "C901", "--config", f"lint.mccabe.max-complexity={COMPLEXITY}", "--isolated"]
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format", "concise", *given, "optgen"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
