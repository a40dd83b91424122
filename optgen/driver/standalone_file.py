"""The definitions of a standalone file: those of modules that its class and its records lead to, name by name."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

Defined = tuple[str, str]
"""A module and the name of something that it defines."""


class Module:
    """The text of a module: what it defines at its top level, and what it imports."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.defined: dict[str, ast.stmt] = {}
        self.ends: dict[str, int] = {}  # the last line of each, with the string behind it that describes it
        self.imported: dict[str, tuple[str, str]] = {}  # alias -> (module, name or "")
        names: list[str] = []
        for node in (tree := ast.parse(text)).body:
            if not isinstance(node, ast.Expr):
                names = _defined(node)
                self.defined |= dict.fromkeys(names, node)
            self.ends |= dict.fromkeys(names, node.end_lineno or 0)
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Import):
                self.imported |= {a.asname or a.name: (a.name, "") for a in inner.names}
            elif isinstance(inner, ast.ImportFrom) and inner.module != "__future__":
                self.imported |= {a.asname or a.name: (inner.module or "", a.name) for a in inner.names}


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _methods(node: ast.stmt) -> list[ast.FunctionDef]:
    """Return the methods of a class that nobody calls but by their names."""
    if not isinstance(node, ast.ClassDef) or any(isinstance(base, ast.Attribute) for base in node.bases):
        return []  # torch calls methods of its optimizer
    return [x for x in node.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("__")]


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a function binds."""
    inside = list(ast.walk(node))
    stored = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return stored | {x.arg for x in inside if isinstance(x, ast.arg)}


class File:
    """The definitions of a file, gathered from modules; a definition comes behind those of modules before its own.

    modules  name -> text, in their order in the file
    wanted   module -> words; those of them that it defines are the definitions to begin with
    used     words that name methods which are called
    """

    def __init__(self, modules: Mapping[str, str], wanted: Mapping[str, Iterable[str]], used: Iterable[str]) -> None:
        self.modules = {name: Module(text) for name, text in modules.items()}
        first = ((module, x) for module in wanted for x in sorted(wanted[module]) if x in self.modules[module].defined)
        self.wanted, self.used, self.outside = dict.fromkeys(first), set(used), dict[str, tuple[str, str]]()
        size = (0, 0)
        while size != (size := (len(self.wanted), len(self.used))):
            for module, name in list(self.wanted):
                self._follow(module, self.modules[module].defined[name])

    def _follow(self, module: str, node: ast.stmt) -> None:
        """Take what a definition leads to, its methods that nothing uses left out."""
        left = self._left(node)
        parts = [x for x in ast.iter_child_nodes(node) if x not in left] if isinstance(node, ast.ClassDef) else [node]
        for part in parts:
            bound = _bound(part) if isinstance(part, (ast.FunctionDef, ast.AnnAssign)) else set()
            for inner in ast.walk(part):
                if isinstance(inner, ast.Attribute):
                    self.used.add(inner.attr)
                    if isinstance(inner.value, ast.Name) and inner.value.id not in bound:
                        self._take(module, inner.value.id, inner.attr)
                elif isinstance(inner, ast.Name) and inner.id not in bound:
                    self._take(module, inner.id)

    def _left(self, node: ast.stmt) -> list[ast.FunctionDef]:
        return [x for x in _methods(node) if x.name not in self.used]

    def _take(self, module: str, name: str, attribute: str = "") -> None:
        found = self.target(module, name, attribute)
        if found is not None:
            self.wanted[found] = None
        elif name in self.modules[module].imported and not self._module(module, name):
            source, original = self.modules[module].imported[name]
            package = source.partition(".")[0]
            assert package != "optgen", f"{module} takes {original} of {source}, which is not in the file"
            if package != "triton":  # which the file imports where there is one
                self.outside[name] = source, original

    def _module(self, module: str, alias: str) -> str:
        """Return the module of this file that a name stands for; "" for any other name."""
        full = ".".join(filter(None, self.modules[module].imported.get(alias, ("", ""))))
        return full if full in self.modules else ""

    def target(self, module: str, name: str, attribute: str = "") -> Defined | None:
        """Return the definition that a name, or an attribute of a module, stands for; None for any other name."""
        of = self._module(module, name)
        if of:
            return (of, attribute) if attribute in self.modules[of].defined else None
        if name in self.modules[module].defined:
            return module, name
        source, original = self.modules[module].imported.get(name, ("", ""))
        return self.target(source, original) if source in self.modules else None

    @cached_property
    def names(self) -> Mapping[Defined, str]:
        """The name of each definition in the file: its own, behind that of its module where another has it too."""
        given: dict[Defined, str] = {}
        taken = {*dir(builtins), *self.outside}
        for module, name in self.wanted:
            own = f"{module.rpartition('.')[2]}_{name.lstrip('_')}" if name in taken else name
            given[module, name] = own
            taken.add(own)
        return given

    def body(self) -> str:
        """Return the definitions; constants stand one below the other."""
        out = last = ""
        for name, module in self.modules.items():
            for x in {id(node): x for x, node in module.defined.items() if (name, x) in self.wanted}.values():
                text = self._renamed(name, x, "\n".join(self._lines(name, x)))
                constant = "" if text.endswith('"""') or not re.match(r"\w+ = ", text) else "constant"
                out += ("\n" if constant and constant == last else "\n\n\n") + text
                last = constant
        return out.strip("\n")

    def _lines(self, module: str, name: str) -> Iterator[str]:
        """Yield the lines of a definition: methods that nothing uses are left out, and of docstrings all but the first
        paragraph, but for those of the last module, the user's."""
        source = self.modules[module]
        node, lines = source.defined[name], list(source.lines)
        spans = [(_top(method), method.end_lineno or 0) for method in self._left(node)]
        for inner in ast.walk(node) if module != [*self.modules][-1] else ():
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and "\n\n" in (ast.get_docstring(inner) or ""):
                cut = lines.index("", inner.body[0].lineno - 1)
                spans.append((cut + 1, inner.body[0].end_lineno or 0))
                lines[cut - 1] += '"""'
        left, last = {k for first, last in spans for k in range(first, last + 1)}, ""
        for k in range(_top(node), source.ends[name] + 1):
            line = lines[k - 1]
            if k not in left and (line or last):
                yield line
                last = line

    def _renamed(self, module: str, name: str, text: str) -> str:
        """Return the text of a definition with the names of this file."""
        source = self.modules[module]
        for alias in filter(lambda x: self._module(module, x), source.imported):
            own = self._module(module, alias)
            text = re.sub(rf"(?<![\w.]){alias}\.(\w+)", lambda m: self.names.get((own, m[1]), m[0]), text)  # noqa: B023
        field = r"(?!: )" if isinstance(source.defined[name], ast.ClassDef) else ""
        for plain in sorted({*source.defined, *source.imported}):
            found = self.target(module, plain)
            if found is not None and self.names.get(found, plain) != plain:
                text = re.sub(rf"(?<![\w.]){plain}\b(?!=[^=]){field}", self.names[found], text)
        return text

    def imports(self) -> Iterator[str]:
        """Yield the imports of other packages."""
        yield from sorted(f"import {module}" for module, original in self.outside.values() if not original)
        for module in sorted({module for module, original in self.outside.values() if original}):
            names = sorted(name for name, (of, original) in self.outside.items() if of == module and original)
            yield f"from {module} import {', '.join(names)}"


def _top(node: ast.stmt) -> int:
    """Return the first line of a definition, that of its decorators."""
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return min([node.lineno, *(d.lineno for d in decorators)])
