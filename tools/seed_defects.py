"""Seed small defects into optgen, one at a time, to see whether the tests notice them.

    python tools/seed_defects.py                              # list the defects and which test noticed each
    python tools/seed_defects.py --run 7 tests/test_passes.py # put in, test with -x, take out, note the result
    python tools/seed_defects.py --apply 7                    # put in; --revert takes out
    python tools/seed_defects.py --draw                       # draw others for those whose line is gone

tests/seeded_defects.json holds the list: 40 defects drawn with a fixed seed, and those that once went unnoticed. A
defect is one changed line, found by its function and its text, also in another file. `noticed_by` is the first test
that failed, `missed_by` the files that passed. A defect that neither names was never run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "seeded_defects.json"
APPLIED = ROOT / ".pytest_cache" / "seeded_defect.json"
"""The file that is changed now, with its text of before."""

SEED, PER_ROOM, PER_FILE = 20261125, 8, 4
UNNOTICED = "once unnoticed"
STEP = (
    "bucket compiled counting cpu cpu_stages eager keys launch optimizer scalars shared staged stages sums walk weights"
).split()
ROOMS = ("passes", "backends", "formats", "lower", "runtime")
IN_STEP = re.compile("step|run|sort|bucket|prepare|start|update|begin|finish|settle|key|scalar|sum|drive|walk|tile")
"""Names of functions of the runtime that a step calls."""

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "in": "not in"}
_OPERATORS = {"+": "-", "-": "+", "*": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "%": "//", "//": "%"}
_NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "any": "all", "all": "any"}


class Edit(NamedTuple):
    """A change within one line: what is between two columns becomes another text."""

    kind: str
    row: int
    start: int
    end: int
    new: str


def _between(lines: Sequence[str], left: ast.expr, right: ast.expr, table: dict[str, str], kind: str) -> Iterator[Edit]:
    """Exchange the operator that stands between two expressions of one line."""
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    text = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    found = re.search(r"is not|not in|[<>=!+\-*/&|%]+|\bis\b|\bin\b", text)
    if found and found[0] in table:
        start = left.end_col_offset + found.start()
        yield Edit(kind, right.lineno, start, start + len(found[0]), table[found[0]])


def _edits_of(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    """Return the changes that one node of the syntax tree allows."""
    line = lines[node.lineno - 1] if isinstance(node, ast.expr) else ""

    def text(e: ast.expr) -> str:
        return line[e.col_offset : e.end_col_offset]

    if not isinstance(node, ast.expr) or node.lineno != node.end_lineno or node.end_col_offset is None:
        return
    whole = (node.lineno, node.col_offset, node.end_col_offset)
    match node:
        case ast.Compare(left=left, comparators=[right]):
            yield from _between(lines, left, right, _COMPARISONS, "comparison")
        case ast.BinOp(left=left, right=right):
            yield from _between(lines, left, right, _OPERATORS, "operator")
        case ast.Constant(value=value) if type(value) in (int, float):
            yield Edit("constant", *whole, repr(value + 1))
        case ast.BoolOp(values=values):
            rest = [text(v) for v in values[:-1]]
            yield Edit("condition dropped", *whole, (" and " if isinstance(node.op, ast.And) else " or ").join(rest))
        case ast.UnaryOp(op=ast.USub()):
            yield Edit("sign", node.lineno, node.col_offset, node.col_offset + 1, "")
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield Edit("function", node.lineno, node.col_offset, node.col_offset + len(name), _NAMES[name])
        case ast.Call(args=[first, second, *rest], keywords=[]):
            if not any(isinstance(a, ast.Starred | ast.Constant) for a in node.args[:2]):
                args = [text(second), text(first), *map(text, rest)]
                yield Edit("arguments swapped", *whole, f"{text(node.func)}({', '.join(args)})")


def _skipped(node: ast.AST) -> bool:
    """Return True for messages and assertions."""
    called = getattr(getattr(node, "func", None), "id", "")
    told = isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)
    return told or called.endswith("Error") or called == "warn"


def functions(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each function with its dotted name; functions within functions belong to the outer one."""

    def visit(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node

    yield from visit(ast.parse(text).body, "")


@cache
def _spans(text: str) -> tuple[tuple[str, int, int], ...]:
    """Return (function, its first line, the line after its last) of a file, lines counted from 0."""
    return tuple((name, f.lineno - 1, f.end_lineno) for name, f in functions(text))  # type: ignore[attr-defined]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, child in ast.iter_fields(node):
        for n in child if isinstance(child, list) else [child]:
            if isinstance(n, ast.AST) and name not in ("annotation", "returns", "decorator_list") and not _skipped(n):
                yield from _walk(n)


def candidates(path: Path, room: str) -> Iterator[dict[str, Any]]:
    """Yield every defect that fits a file, as an entry of the list."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for name, function in functions(text):
        if room == "runtime" and not IN_STEP.search(name):
            continue
        body = "\n".join(lines[function.lineno - 1 : function.end_lineno])  # type: ignore[attr-defined]
        for node in _walk(function):
            for kind, row, start, end, new in _edits_of(node, lines):
                before = lines[row - 1]
                after = before[:start] + new + before[end:]
                if before.isascii() and body.count(before) == 1 and after != before:
                    place = {"file": str(path.relative_to(ROOT)), "function": name, "kind": kind}
                    yield {"room": room, **place, "before": before.strip(), "after": after.strip()}


def draw(listed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the defects of a list whose line is still there, and drawn ones, each of a function of its own."""
    choice, drawn = random.Random(SEED), [d for d in listed if _changed(d)]
    for room in ROOMS:
        files = [p for p in sorted((ROOT / "optgen" / room).rglob("*.py")) if room != "runtime" or p.stem in STEP]
        found = [c for p in files for c in candidates(p, room)]
        kinds = sorted({c["kind"] for c in found})  # each as likely: every second change that fits is of a constant
        seen = {(d["file"], d["function"]) for d in drawn if d["room"] == room and d["kind"] != UNNOTICED}
        while len(seen) < PER_ROOM:
            kind = choice.choice(kinds)
            defect = choice.choice([c for c in found if c["kind"] == kind])
            place = (defect["file"], defect["function"])
            if place not in seen and sum(f == place[0] for f, _ in seen) < PER_FILE and _changed(defect):
                seen.add(place)
                drawn.append(defect)
    return sorted(drawn, key=lambda d: (d["kind"] == UNNOTICED, ROOMS.index(d["room"])))


def _changed(defect: dict[str, Any]) -> tuple[Path, str, str] | None:
    """Return (file, its text, its text with the defect), or None where the line is gone or is there several times."""
    first = ROOT / defect["file"]
    name, places = defect["function"], []
    for path in [p for p in (first, *sorted((ROOT / "optgen").rglob("*.py"))) if p.is_file()]:
        text = path.read_text(encoding="utf-8")
        if (name.split(".")[-1] or "\n") not in text or defect["before"] not in text:
            continue
        lines = text.split("\n")
        spans = [(a, b) for n, a, b in _spans(text) if n == name] if name else [(0, len(lines))]
        places = [(path, i) for a, b in spans for i in range(a, b) if lines[i].strip() == defect["before"]]
        if places:
            break
    if len(places) != 1:
        return None
    path, at = places[0]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    after = "\n".join([*lines[:at], indent + defect["after"], *lines[at + 1 :]])
    return path, text, after


def apply(defect: dict[str, Any]) -> bool:
    """Put a defect in; return False where its line is gone."""
    if APPLIED.exists():
        sys.exit("a defect is in already; take it out with --revert")
    if (found := _changed(defect)) is None:
        return False
    path, text, after = found
    APPLIED.parent.mkdir(exist_ok=True)
    APPLIED.write_text(json.dumps({"file": str(path.relative_to(ROOT)), "text": text}))
    path.write_text(after, encoding="utf-8")
    return True


def revert() -> None:
    """Take the defect out that is in, if one is."""
    if APPLIED.exists():
        kept = json.loads(APPLIED.read_text())
        (ROOT / kept["file"]).write_text(kept["text"], encoding="utf-8")
        APPLIED.unlink()


def run(defect: dict[str, Any], files: Sequence[str]) -> str:
    """Test with the defect in; return the first test that it makes fail, "" for none, or why nothing can be said."""
    if not apply(defect):
        return "gone: the line was rewritten"
    try:
        failed = _first_failure(files)
    finally:
        revert()
    return f"{failed} fails without it, too" if "::" in failed and _first_failure([failed]) else failed


def _first_failure(files: Sequence[str]) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-rfE", "-m", "not slow and not full", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return "" if done.returncode == 0 else failed[1] if failed else f"{done.stdout}{done.stderr}"[-200:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--apply", type=int, metavar="K")
    parser.add_argument("--revert", action="store_true")
    parser.add_argument("--run", type=int, metavar="K")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args(argv)
    listed: list[dict[str, Any]] = json.loads(LIST.read_text()) if LIST.exists() else []
    if args.draw:
        listed = draw(listed)
    elif args.revert:
        revert()
    elif args.apply is not None:
        return 0 if apply(listed[args.apply]) else 1
    elif args.run is not None:
        defect = listed[args.run]
        found = run(defect, args.files)
        if "::" in found and " " not in found:
            defect["noticed_by"] = found
        elif not found:
            defect["missed_by"] = sorted({*defect.get("missed_by", ()), *args.files})
        print(found or "not noticed")
    else:
        for k, d in enumerate(listed):
            print(f"{k:2} {d['file']} {d['function']}: {d['before']}  ->  {d['after']}\n   {d.get('noticed_by', '')}")
        return 0
    LIST.write_text(json.dumps(listed, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
