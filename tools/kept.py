"""What tools/test_full.py keeps between its runs, and under which key: whatever a result depends on, and nothing else.

A cell's result follows from the text that is printed for it, from the code that runs that text, and from the code
that says what is right.  `reach` finds that code by its imports.  A kernel that is compiled for a target gives what
any other of the same meaning gives: `fingerprint` is the same for kernels that differ in names and comments alone.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sqlite3
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_WRITTEN_IN = {"optgen.runtime.cpu.native": "optgen/runtime/cpu/cpp"}
"""Modules that read files of a folder: the headers of C++ kernels."""


def digest_of(*parts: object) -> str:
    """16 hex digits of a SHA-256 over what `repr` says of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# Files ----------------------------------------------------------------------------------------------------------------


def _file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def _imports(path: Path) -> frozenset[str]:
    """The modules of this repository that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(m for m in found if m.split(".")[0] in ("optgen", "specs", "tests") and _file_of(m))


def is_cpp(text: str) -> bool:
    """Whether a printed text is C++, not Python."""
    return '#include "' in text


def code_of(text: str) -> str:
    """A printed text without the lines that are comments: they say where a spec and a plan stand in their files."""
    mark = "//" if is_cpp(text) else "#"
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(mark))


def imported_by(text: str) -> set[str]:
    """The modules of `optgen` that a printed text imports."""
    return {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.module} - {"__future__"}


@cache
def reach(modules: frozenset[str]) -> str:
    """Digest of the files of these modules and of all that those import from this repository."""
    seen: set[str] = set()
    waiting = [m for m in modules if _file_of(m)]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            file = _file_of(module)
            assert file is not None
            waiting += _imports(file) - seen
    files = {file for module in seen if (file := _file_of(module))}
    for module in seen & _WRITTEN_IN.keys():
        files |= {p for p in (ROOT / _WRITTEN_IN[module]).iterdir() if p.is_file()}
    return digest_of(*((p.relative_to(ROOT).as_posix(), p.read_bytes()) for p in sorted(files)))


# Kernels --------------------------------------------------------------------------------------------------------------


def fingerprint(fn: Any) -> str:
    """Digest of a `@triton.jit` function and of those that it calls in its module, whatever their values are called.

    Names of parameters, values and functions of that module are numbered in the order in which they come; comments and
    docstrings are left out.  What is imported keeps its name, a constant of the module is its value.
    """
    scope, numbers = fn.fn.__globals__, {fn.fn.__name__: 0}
    waiting, texts = [fn], []
    while waiting:
        function = waiting.pop(0)
        canonical = _Canonical(scope, function.fn.__module__, numbers, waiting)
        texts.append(ast.unparse(canonical.visit(ast.parse(inspect.getsource(function.fn)))))
    return digest_of(*texts)


class _Canonical(ast.NodeTransformer):
    """Renames what a function's author has named."""

    def __init__(self, scope: Mapping[str, Any], module: str, numbers: dict[str, int], waiting: list[Any]) -> None:
        self.scope, self.module, self.numbers, self.waiting = scope, module, numbers, waiting
        self.own: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.decorator_list = f"f{self.numbers[node.name]}", []
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self.own[arg.arg] = f"v{len(self.own)}"
        self.own |= {
            n.id: f"v{len(self.own) + k}"
            for k, n in enumerate(x for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
            if n.id not in self.own
        }
        self.own = {name: f"v{k}" for k, name in enumerate(self.own)}
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.own[node.arg]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id
        if name in self.own:
            node.id = self.own[name]
            return node
        value = self.scope.get(name, _MISSING)
        value = value.value if type(value).__name__ == "constexpr" else value  # Triton's wrapper can be called
        inner = getattr(value, "fn", None)
        if inner is not None and inner.__module__ == self.module:
            if inner.__name__ not in self.numbers:
                self.numbers[inner.__name__] = len(self.numbers)
                self.waiting.append(value)
            node.id = f"f{self.numbers[inner.__name__]}"
        elif inner is None and value is not _MISSING and not inspect.ismodule(value) and not callable(value):
            node.id = f"constant_{digest_of(value)}"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = getattr(self.scope.get(node.func.id), "fn", None) if isinstance(node.func, ast.Name) else None
        if called is not None and called.__module__ == self.module and node.keywords:
            raise ValueError(f"{ast.unparse(node)}: an argument by name would keep the name that its author gave")
        return self.generic_visit(node)


_MISSING = object()


class CompiledKernels:
    """What compiling a kernel for a target gave, by key: bytes of stack within the registers that were planned for it,
    those within the registers that it takes on a device, and bytes of shared memory.

    One SQLite file that any number of processes read and write.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = sqlite3.connect(path, timeout=60, isolation_level=None)
        columns = "key text primary key, planned integer, stack integer, shared integer"
        self.file.execute(f"create table if not exists compiled ({columns})")

    def get(self, key: str) -> tuple[int, int, int] | None:
        found = self.file.execute("select planned, stack, shared from compiled where key = ?", (key,)).fetchone()
        return None if found is None else (int(found[0]), int(found[1]), int(found[2]))

    def put(self, key: str, planned: int, stack: int, shared: int) -> None:
        self.file.execute("insert or replace into compiled values (?, ?, ?, ?)", (key, planned, stack, shared))

    def close(self) -> None:
        self.file.close()


# Results --------------------------------------------------------------------------------------------------------------


class Kept:
    """Results of earlier runs, and a file that takes what this one finds, a line for each as it comes.

    A line has `item` (what was run), `state` (all sources, as they are), `of` (the sources under which it was run),
    `key` (what the result depends on) and `result`.
    """

    def __init__(self, path: Path, state: str, fresh: bool = False) -> None:
        self.path, self.state = path, state
        self.rows: dict[str, list[dict[str, Any]]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and not fresh else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if row.keys() >= {"item", "state", "of", "key", "result"}:
                self.rows.setdefault(row["item"], []).append(row)

    def now(self, item: str) -> dict[str, Any] | None:
        """The item's row that holds for these very sources."""
        return next((row for row in reversed(self.rows.get(item, ())) if row["state"] == self.state), None)

    def of_key(self, item: str) -> dict[str, dict[str, Any]]:
        """The item's rows by their keys, the newest of each."""
        return {row["key"]: row for row in self.rows.get(item, ())}

    def add(self, item: str, key: str, result: Mapping[str, Any], of: str = "") -> None:
        """`of` is the state under which it was run, where that is not this one."""
        row = {"item": item, "state": self.state, "of": of or self.state, "key": key, "result": result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * _cut(self.path, file.tell()) + json.dumps(row) + "\n")


def _cut(path: Path, size: int) -> int:
    """Whether a killed run left half a line at the end."""
    if size == 0:
        return 0
    with path.open("rb") as before:
        before.seek(-1, os.SEEK_END)
        return int(before.read(1) != b"\n")


def commit() -> str:
    """The commit that is checked out, short, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty= and changes", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def sources(folders: Iterable[str], files: Iterable[str]) -> str:
    """Digest of all sources of these folders, and of these files."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix != ".pyc"]
    found += [ROOT / file for file in files]
    return digest_of(*((p.relative_to(ROOT).as_posix(), p.read_bytes()) for p in sorted(found) if p.is_file()))
