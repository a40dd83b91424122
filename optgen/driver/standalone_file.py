"""The definitions of a standalone file: found by following names from its class, in the order of their imports."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

CLASS, KERNELS = "optgen.driver.standalone_class", "optgen.driver.standalone_kernels"
RECORDS, PRELUDE, SCALARS = "optgen.runtime.records", "optgen.runtime.gpu.prelude", "optgen.runtime.records.scalars"
OWN = {
    RECORDS: (CLASS, ("Field", "Variant")),
    "optgen.runtime.gpu.codecs": (KERNELS, ("beside", "fraction", "integer", "middle", "plus", "read", "times")),
    PRELUDE: (KERNELS, ("block_least", "block_magnitude", "block_max", "block_min", "machine", "rounded")),
}
"""Module -> where a file has smaller definitions of these names."""
PLAIN = {PRELUDE: ("reciprocal", "inverse", "floor"), SCALARS: ()}
"""Module -> its functions whose branches for machines give different results.  All others have a last branch with the
results of every other one, and a file has that one alone; host scalars of a file are numbers."""


class _Plain(ast.NodeTransformer):
    """Take the branches of functions that run on any machine, and of numbers; leave out types of numbers."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        scalar = node.annotation is not None and ast.unparse(node.annotation) in ("Scalar", "Truth")
        return ast.arg(node.arg) if scalar else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.returns is not None and ast.unparse(node.returns) in ("Scalar", "Truth"):
            node.returns = None
        return node

    def visit_If(self, node: ast.If | ast.IfExp) -> Any:
        self.generic_visit(node)
        found = _decided(node.test)
        return node if found is None else node.body if found else node.orelse

    visit_IfExp = visit_If  # noqa: N815


def _decided(test: ast.expr) -> bool | None:
    """Return the value of a condition on an unknown machine, where no number is a tensor; None: it depends."""
    if isinstance(test, ast.BoolOp):
        parts = [_decided(x) for x in test.values]
        ends = isinstance(test.op, ast.Or)
        return ends if ends in parts else None if None in parts else not ends
    if isinstance(test, ast.UnaryOp):
        found = _decided(test.operand)
        return None if found is None else not found
    return False if re.match(r"machine\(\)|isinstance\(\w+, Tensor\)", ast.unparse(test)) else None


def _plain(text: str, left: Collection[str]) -> str:
    """Return a module without what its functions do for one machine, or for tensors."""
    lines = text.splitlines()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and node.name not in left:
            before = ast.unparse(node)
            _Plain().visit(node)
            *_, made, end = [None, *node.body]
            if isinstance(made, ast.Assign) and f"return {ast.unparse(made.targets[0])}" == ast.unparse(end):
                node.body[-2:] = [ast.Return(made.value)]
            after = ast.unparse(node)
            if before != after:
                lines[_top(node) - 1 : node.end_lineno] = after.splitlines()
    return "\n".join(lines)


@dataclass
class Source:
    """A module as its text: what it defines at its top level, and what it imports."""

    name: str
    text: str
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    following: dict[str, ast.stmt] = field(default_factory=dict)  # the string after a definition that describes it
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # alias -> (module, name or "")

    def __post_init__(self) -> None:
        last = ""
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.Expr) and last:
                self.following[last] = node
            names = self._names(node)
            self.defined |= dict.fromkeys(names, node)
            last = names[0] if names and isinstance(node, (ast.Assign, ast.AnnAssign)) else ""
        for inner in ast.walk(ast.parse(self.text)):
            if isinstance(inner, ast.Import):
                self.imported |= {a.asname or a.name: (a.name, "") for a in inner.names}
            elif isinstance(inner, ast.ImportFrom) and inner.module and inner.module != "__future__":
                self.imported |= {a.asname or a.name: (inner.module, a.name) for a in inner.names}

    @staticmethod
    def _names(node: ast.stmt) -> list[str]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return [node.name]
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            return []
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()


Defined = tuple[str, str]
"""A module and the name of something that it defines."""


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a function binds: its arguments, and what it assigns."""
    inside = list(ast.walk(node))
    stored = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return stored | {x.arg for x in inside if isinstance(x, ast.arg)}


def _free(node: ast.AST, left: Collection[ast.AST] = (), bound: Set[str] = frozenset()) -> Iterator[ast.AST]:
    """Yield the nodes of a definition but for names that its functions bind, and for the methods that are left out."""
    if node in left:
        return
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        bound = bound | _bound(node)
    if isinstance(node, ast.Name) and node.id in bound:
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.ClassDef) and isinstance(child, ast.AnnAssign):  # its fields are no names elsewhere
            for part in (child.annotation, child.value):
                if part is not None:
                    yield from _free(part, left, bound)
            continue
        yield from _free(child, left, bound)


def _methods(node: ast.stmt) -> list[ast.FunctionDef]:
    """Return the methods of a class that nobody calls but by their names."""
    if not isinstance(node, ast.ClassDef) or any(isinstance(base, ast.Attribute) for base in node.bases):
        return []  # torch calls methods of its optimizer
    return [x for x in node.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("__")]


def _top(node: ast.stmt) -> int:
    """Return the first line of a definition, that of its decorators."""
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return min([node.lineno, *(d.lineno for d in decorators)])


class File:
    """The definitions of a standalone file, gathered from modules."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.sources = {name: Source(name, text) for name, text in texts.items()}
        self.wanted: dict[Defined, None] = {}
        self.outside: dict[str, tuple[str, str]] = {}
        self.order: list[str] = []
        self.used: set[str] = set()
        self.methods: dict[str, list[tuple[Source, ast.FunctionDef]]] = {}  # those that nothing has used yet
        self.kept: set[int] = set()

    def source(self, name: str) -> Source | None:
        """Return a module of optgen; None for any other."""
        if name not in self.sources and name.partition(".")[0] == "optgen":
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            text = Path(spec.origin).read_text(encoding="utf-8")
            self.sources[name] = Source(name, _plain(text, PLAIN[name]) if name in PLAIN else text)
        return self.sources.get(name)

    def want(self, module: str, name: str) -> None:
        """Take a definition, and all that its names lead to; of a class those methods whose names are used anywhere."""
        if (module, name) in self.wanted:
            return
        source = self.source(module)
        assert source is not None and name in source.defined, (module, name)
        self.wanted[module, name] = None
        node = source.defined[name]
        later = _methods(node)
        for part in [x for x in ast.iter_child_nodes(node) if x not in later] if later else [node]:
            for inner in [part.annotation, part.value] if isinstance(part, ast.AnnAssign) else [part]:
                if inner is not None:
                    self._follow(source, inner)
        for method in later:
            self.methods.setdefault(method.name, []).append((source, method))
            if method.name in self.used:
                self._use(method.name)
        if module not in self.order:  # after what it imports: these have been wanted before
            self.order.append(module)

    def _follow(self, source: Source, part: ast.AST) -> None:
        for node in _free(part):
            found = self.target(source, node)
            if found is not None:
                self.want(*found)
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                self._use(node.attr)

    def _use(self, method: str) -> None:
        """Take the methods of that name."""
        self.used.add(method)
        for source, node in self.methods.pop(method, []):
            self.kept.add(id(node))
            self._follow(source, node)

    def target(self, source: Source, node: ast.AST) -> Defined | None:
        """Return the definition that a name, or an attribute of a module, stands for; None for any other node."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self._module(source, node.value.id)
            return None if module is None else (module, node.attr)
        if not isinstance(node, ast.Name):
            return None
        if node.id in source.defined:
            own = OWN.get(source.name, ("", ()))
            return (own[0] if node.id in own[1] else source.name), node.id
        if node.id not in source.imported or self._module(source, node.id) is not None:
            return None
        module, name = source.imported[node.id]
        if module in OWN and name in OWN[module][1]:
            return OWN[module][0], name
        while name and (found := self.source(module)) is not None:
            if name in found.defined:
                return module, name
            module, name = found.imported[name]
        self.outside[node.id] = source.imported[node.id]
        return None

    def _module(self, source: Source, alias: str) -> str | None:
        """Return the module of optgen that a name stands for."""
        module, name = source.imported.get(alias, ("", ""))
        full = f"{module}.{name}" if name else module
        if full.partition(".")[0] != "optgen":
            return None
        try:
            return full if importlib.util.find_spec(full) is not None else None
        except ModuleNotFoundError:  # a name in a module
            return None

    @cached_property
    def names(self) -> Mapping[Defined, str]:
        """The name of each definition in the file: its own, behind that of its module where another has it too."""
        functions = (self.sources[module].defined[name] for module, name in self.wanted)
        local = {x for node in functions for f in ast.walk(node) if isinstance(f, ast.FunctionDef) for x in _bound(f)}
        given: dict[Defined, str] = {}
        taken = {*local, *self.outside, *dir(builtins)}
        for module, name in self.wanted:
            own = f"{module.rpartition('.')[2]}_{name.lstrip('_')}" if name in taken else name
            taken.add(own)
            given[module, name] = own
        return given

    def _left(self, node: ast.stmt) -> list[ast.FunctionDef]:
        """Return the methods of a class that nothing uses."""
        return [x for x in _methods(node) if id(x) not in self.kept]

    def text_of(self, module: str, name: str) -> str:
        """Return the text of a definition with the names of this file."""
        source = self.sources[module]
        node = source.defined[name]
        lines = list(source.lines)
        edits: dict[tuple[int, int], tuple[int, str]] = {}
        for inner in _free(node, self._left(node)):
            found = self.target(source, inner)
            if found is not None and isinstance(inner, (ast.Name, ast.Attribute)):
                assert inner.end_col_offset is not None
                edits[inner.lineno, inner.col_offset] = inner.end_col_offset, self.names[found]
            elif inner is node and isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                start = lines[inner.lineno - 1].index(f" {name}") + 1
                edits[inner.lineno, start] = start + len(name), self.names[module, name]
        for (line, start), (end, new) in sorted(edits.items(), reverse=True):
            raw = lines[line - 1].encode()
            lines[line - 1] = (raw[:start] + new.encode() + raw[end:]).decode()
        last = source.following.get(name, node).end_lineno
        spans = ((_top(method), method.end_lineno or 0) for method in self._left(node))
        left = {k for first, end in spans for k in range(first - 1, end)}
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and "\n\n" in doc:
            start, end = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            cut = lines.index("", start)
            lines[cut - 1] += '"""'
            left |= set(range(cut, end))
        kept = [line for k, line in enumerate(lines[:last]) if k >= _top(node) - 1 and k not in left]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip()

    def _first(self, module: str, name: str) -> Iterator[Defined]:
        """Yield what has to stand before a definition: what is evaluated as it is made."""
        source = self.sources[module]
        node = source.defined[name]
        parts: list[ast.AST] = [node]
        if isinstance(node, ast.FunctionDef):
            parts = [*node.decorator_list, *node.args.defaults, *(x for x in node.args.kw_defaults if x)]
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list, *node.bases]
            parts += [x.value for x in node.body if isinstance(x, (ast.Assign, ast.AnnAssign)) and x.value]
        calls = any(isinstance(x, ast.Call) for part in parts for x in ast.walk(part))
        for part in parts:
            for inner in _free(part):
                found = self.target(source, inner)
                if found is not None and found != (module, name):
                    yield found
                    if calls:
                        yield from self._within(*found, set())

    def _within(self, module: str, name: str, seen: set[Defined]) -> Iterator[Defined]:
        """Yield what a function needs when it is called."""
        source = self.sources[module]
        node = source.defined[name]
        for inner in _free(node, self._left(node)):
            found = self.target(source, inner)
            if found is not None and found not in seen:
                seen.add(found)
                yield found
                yield from self._within(*found, seen)

    def body(self) -> Iterator[str]:
        """Yield the definitions, in the order of modules and lines, each after what it needs to be made."""
        done: set[int] = set()

        def place(module: str, name: str) -> Iterator[str]:
            node = self.sources[module].defined[name]
            if id(node) in done:
                return
            done.add(id(node))
            for first in self._first(module, name):
                yield from place(*first)
            yield self.text_of(module, name)

        rank = {module: k for k, module in enumerate(self.order)}
        for module, name in sorted(self.wanted, key=lambda x: (rank[x[0]], self.sources[x[0]].defined[x[1]].lineno)):
            yield from place(module, name)

    def imports(self) -> Iterator[str]:
        """Yield the imports of what is not optgen's: those of the standard library, then torch's and Triton's."""
        plain = sorted({module for module, name in self.outside.values() if not name})
        several: dict[str, set[str]] = {}
        for alias, (module, name) in self.outside.items():
            if name:
                several.setdefault(module, set()).add(name if name == alias else f"{name} as {alias}")
        for standard in (True, False):
            yield ""
            for module in plain:
                if (module.partition(".")[0] in sys.stdlib_module_names) == standard:
                    alias = next(a for a, found in self.outside.items() if found == (module, ""))
                    yield f"import {module}" + ("" if alias == module else f" as {alias}")
            for module, found in sorted(several.items()):
                if (module.partition(".")[0] in sys.stdlib_module_names) == standard:
                    yield f"from {module} import {', '.join(sorted(found))}"
