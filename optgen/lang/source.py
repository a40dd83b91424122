"""The author's function as text: which statement an instruction belongs to, and what it names.

Read-only: the function that runs is the author's own, untouched.  Names of values, places of declarations
and the names in `return` are looked up here.
"""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

from optgen.base.errors import UserError
from optgen.base.loc import Loc, of_code

TextSpan = tuple[int, int, int, int]  # line, column, end line, end column; lines from 1, columns from 0
_PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")


def span_of(node: ast.AST) -> TextSpan:
    line, column, end_line, end_column = (getattr(node, k, 0) or 0 for k in _PLACE)
    return line, column, end_line, end_column


def within(inner: TextSpan, outer: TextSpan) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


@dataclass(frozen=True)
class Statement:
    """One simple statement: its text on one line, and the names that it binds, in order."""

    span: TextSpan
    text: str
    names: tuple[str, ...]


@lru_cache(maxsize=256)
def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a file, or None where it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def forget(file: str) -> None:
    """Drop what is remembered of a file, before it is loaded again."""
    tree_of.cache_clear()
    linecache.checkcache(file)


def _names(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _names(element)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)


def _bound(statement: ast.stmt) -> tuple[str, ...]:
    """Return the names that a statement binds: walrus targets first, because they are evaluated first."""
    names = [n.target.id for n in ast.walk(statement) if isinstance(n, ast.NamedExpr)]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    for target in targets:
        names += _names(target)
    return tuple(names)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of the function's body, without those of functions defined in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from own_nodes(child)


class SpecSource:
    """The source of one spec function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.code: CodeType = function.__code__
        self.file = self.code.co_filename
        self.name = function.__name__
        node = self._find()
        if node is None:
            raise UserError("E132", loc=of_code(self.code), name=self.name)
        self.node: ast.FunctionDef = node
        self.globals: dict[str, Any] = function.__globals__

    def _find(self) -> ast.FunctionDef | None:
        tree = tree_of(self.file)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if self.code.co_firstlineno in (first, node.lineno):
                    return node
        return None

    def loc(self, node: ast.AST) -> Loc:
        return Loc(self.file, *span_of(node), self.name)

    @property
    def head(self) -> Loc:
        """The `def` line's name."""
        start = self.node.col_offset + len("def ")
        end = start + len(self.name.encode())
        return Loc(self.file, self.node.lineno, start, self.node.lineno, end, self.name)

    @cached_property
    def parameters(self) -> dict[str, Loc]:
        """Name -> place of the declaration: the parameter and its default."""
        a = self.node.args
        positional = [*a.posonlyargs, *a.args]
        defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
        pairs = [*zip(positional, defaults, strict=True), *zip(a.kwonlyargs, a.kw_defaults, strict=True)]
        spans = {arg.arg: span_of(arg)[:2] + span_of(default or arg)[2:] for arg, default in pairs}
        return {name: Loc(self.file, *span, self.name) for name, span in spans.items()}

    def lambda_of(self, name: str) -> str | None:
        """The lambda in a keyword parameter's default, as text that needs nothing but builtins."""
        a = self.node.args
        default = next((d for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if arg.arg == name), None)
        if not isinstance(default, ast.Call) or not default.args or not isinstance(default.args[0], ast.Lambda):
            return None
        function = default.args[0]
        arguments = {x.arg for x in function.args.args}
        free = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} - arguments
        return ast.unparse(function) if free <= set(dir(builtins)) else None

    def free_names(self) -> list[str]:
        """Return the names that the function reads but neither binds nor finds among the builtins."""
        stored = {n.id for n in ast.walk(self.node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        signatures = [n for n in ast.walk(self.node) if isinstance(n, ast.arguments)]
        arguments = {x.arg for n in signatures for x in (*n.args, *n.kwonlyargs)}
        inside = [n for statement in self.node.body for n in ast.walk(statement)]
        read = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        return sorted(read - stored - arguments - set(dir(builtins)))

    def text(self) -> str:
        """The function's source without decorators and annotations."""
        plain = ast.parse(ast.unparse(self.node)).body[0]
        assert isinstance(plain, ast.FunctionDef)
        plain.decorator_list, plain.returns = [], None
        for x in (*plain.args.args, *plain.args.kwonlyargs):
            x.annotation = None
        return ast.unparse(plain)

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
        text = "".join(linecache.getlines(self.file))
        return tuple(
            Statement(span_of(n), " ".join((ast.get_source_segment(text, n) or "").split()), _bound(n))
            for n in own_nodes(self.node)
            if isinstance(n, kinds)
        )

    @cached_property
    def _at_instruction(self) -> list[Statement | None]:
        out: list[Statement | None] = []
        for line, end_line, col, end_col in self.code.co_positions():
            if line is None:
                out.append(None)
                continue
            # Without columns (PYTHONNODEBUGRANGES) the line alone decides.
            inner = (line, col or 0, end_line or line, end_col or col or 0)
            hits = [s for s in self.statements if within(inner, s.span) or (col is None and s.span[0] == line)]
            out.append(min(hits, key=lambda s: (s.span[2] - s.span[0], s.span[3] - s.span[1]), default=None))
        return out

    def statement_at(self, lasti: int) -> Statement | None:
        """The statement of the instruction at a byte offset."""
        i = lasti // 2
        return self._at_instruction[i] if 0 <= i < len(self._at_instruction) else None

    def unpacked(self, name: str) -> list[tuple[str, Loc]] | None:
        """The names in `a, b = name` and where they stand, where the function has such a statement."""
        for n in own_nodes(self.node):
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name) and n.value.id == name:
                target = n.targets[0]
                if isinstance(target, (ast.Tuple, ast.List)) and all(isinstance(e, ast.Name) for e in target.elts):
                    return [(part, self.loc(e)) for e in target.elts for part in _names(e)]
        return None

    @cached_property
    def returns(self) -> tuple[tuple[ast.Return, tuple[tuple[str | None, Loc], ...]], ...]:
        """Every return statement with its elements: (name or None where it is no plain name, place)."""
        out = []
        for n in own_nodes(self.node):
            if isinstance(n, ast.Return):
                parts = n.value.elts if isinstance(n.value, ast.Tuple) else [n.value] if n.value else []
                out.append((n, tuple((e.id if isinstance(e, ast.Name) else None, self.loc(e)) for e in parts)))
        return tuple(out)
