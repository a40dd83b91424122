"""`optgen build --standalone`: a rule under a plan as one file that imports torch and nothing of optgen.

The file holds the definitions that the optimizer needs of the runtime and of the generated text, found by following
names from its class, in the order of their imports.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from optgen.backends import wrapper
from optgen.base.errors import UserError
from optgen.driver import eager_text, emit, explain, record_text, standalone_class
from optgen.driver.record_text import Name, written
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.runtime.records import Variant, join
from optgen.runtime.records.join import RuleRecord

CLASS = "optgen.driver.standalone_class"
RULE, RECORDS, CODECS = "rule", "records", "codecs"
ROWS = ("Field", "Variant")  # records that the class has of its own, smaller than the runtime's


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
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
    return found


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
            self.sources[name] = Source(name, Path(spec.origin).read_text(encoding="utf-8"))
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
            self._follow(source, part)
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
            return source.name, node.id
        if node.id not in source.imported or self._module(source, node.id) is not None:
            return None
        module, name = source.imported[node.id]
        if name in ROWS and module == "optgen.runtime.records":
            return CLASS, name
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
            own = name
            if own in taken:
                own = f"{module.rpartition('.')[2]}_{name.lstrip('_')}"
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


def refuse(spec: Spec, variants: Iterable[Variant], rules: Iterable[RuleRecord]) -> None:
    """UserError for a rule that one file does not serve."""
    why = ""
    if any(f.every for f in spec.flags):
        why = "some of its steps are made in another way"
    elif spec.evaluation is not None:
        why = "it has other weights for evaluation"
    elif spec.blocks:
        why = "its user says how many blocks of rows a parameter has"
    elif any("model" in rule.spaces for rule in rules):
        why = "it sums over all parameters of a model"
    elif any(v.init and v.axes for v in map(row, variants)):
        why = "its states do not begin at 0"
    if why:
        raise UserError("E419", loc=spec.loc, name=spec.name, why=why)


def row(variant: Variant, names: Mapping[Defined, str] | None = None) -> standalone_class.Variant:
    """Return what the file says of a variant; `names`: those of the functions in the file."""
    fields = tuple(
        standalone_class.Field(
            f.name, f.dtype, f.per, f.zero, "" if f.state == f.name else f.state, f.width, f.space, f.matrix, f.shared
        )
        for f in variant.fields
    )
    step, host = (RULE, variant.step), (RECORDS, str(variant.host))
    assert variant.eager is not None
    functions: Any = [Name(names[x] if names else x[1]) for x in (step, host)]
    return standalone_class.Variant(
        variant.param,
        functions[0],
        functions[1],
        len(variant.scalars),
        small=variant.small,
        vector=variant.vector,
        fields=fields,
        host_states=variant.host_states,
        init=variant.init,
        matrix=variant.matrix,
        axes=variant.has_axes,
        eager=variant.eager,
    )


def text(spec: Spec, plan: Plan) -> str:
    """Return the file of a rule under a plan; UserError for a rule that one file does not serve."""
    _, rules = record_text.rules(spec)
    record = record_text.plan_record(plan)
    fixed = {f.name: f.default for f in spec.flags if not f.derived}
    variants = [v for v in join.variants(rules, record) if all(v.flags[k] == on for k, on in fixed.items())]
    refuse(spec, variants, rules)
    file = File(
        {RULE: eager_text.rule_text(spec), RECORDS: record_text.rule_text(spec), CODECS: eager_text.codec_text(plan)}
    )
    base = "Starting" if any(v.init for v in variants) else "SingleFile"
    codecs = sorted({name for v in variants if v.eager for name in v.eager.codecs.values()})
    for module, names in (
        (CLASS, {base, *ROWS}),
        (CODECS, codecs),
        (RULE, {v.step for v in variants}),
        (RECORDS, {str(v.host) for v in variants}),
    ):
        for name in sorted(names):
            file.want(module, name)
    file.outside["SimpleNamespace"] = "types", "SimpleNamespace"
    assert all(file.names[CLASS, name] == name for name in (base, *ROWS))
    kept = [
        replace(row(v, file.names), flags={k: on for k, on in v.flags.items() if k not in fixed}) for v in variants
    ]
    c = emit.class_row(spec, (plan.name,), {})
    flags = (f'"{f.name}": {f.shape or (repr(f.nonzero) if f.nonzero else f.default)}' for f in c.flags if f.derived)
    return wrapper.render(
        "standalone.py.j2",
        c=c,
        base=base,
        plan=plan.name,
        stored=explain.storage_lines(explain.of_plan(plan)),
        imports=list(file.imports()),
        body=list(file.body()),
        variants=list(written("VARIANTS = ", tuple(kept))),
        codecs=f"SimpleNamespace({', '.join(f'{name}={file.names[CODECS, name]}' for name in codecs)})",
        small=record.small_numel,
        flags=list(flags),
        arguments=c.arguments[: len(c.hypers)],
        signature=c.signature[: len(c.hypers)],
    )
