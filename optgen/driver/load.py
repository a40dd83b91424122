"""Find and load specs and plans: the user's own first, then the ready-made ones.

A name is looked for in the project's `specs/` folder, then among the ready-made specs; `file.py` is the one in that
file, and `file.py:name` one of several. A spec is Python: loading a file runs it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import importlib.util
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType, NoneType
from typing import TypeVar

import optgen.formats
import optgen.lang
from optgen.base import ready
from optgen.base.errors import UserError, did_you_mean, said
from optgen.base.loc import Loc, of_characters, of_frame, relative
from optgen.formats.plan import Plan
from optgen.lang import policies, wrappers
from optgen.lang.refusals import FUNCTIONS, instead_of
from optgen.lang.source import check_encoding, forget
from optgen.lang.spec import Spec

PLANS_FILE = "plans.py"

SpecOrPlan = TypeVar("SpecOrPlan", Spec, Plan)


@dataclass(frozen=True)
class SpecEntry:
    """A spec before it is loaded: its name, its file, whether the file is the project's own, and its place in it."""

    name: str
    file: Path
    own: bool
    place: Loc


def table_above(folder: Path) -> Path | None:
    """Return the nearest folder at or above this one whose pyproject.toml holds [tool.optgen]."""
    for place in (folder.resolve(), *folder.resolve().parents):
        file = place / "pyproject.toml"
        with contextlib.suppress(OSError):  # of another project above; read_config reports the project's own
            if file.is_file() and _TABLE.search(file.read_bytes()):
                return place
    return None


_TABLE = re.compile(rb"^\s*\[+\s*tool\s*\.\s*optgen\b", re.MULTILINE)


def home() -> Path:
    """Return the current folder if it has `specs/`, else the nearest above with [tool.optgen], else the current one."""
    here = Path.cwd()
    return here if (here / "specs").is_dir() else table_above(here) or here


def folders(project: Path | None = None) -> tuple[Path, ...]:
    """Return the folders of specs: `specs/` of the project (by default `home()`), and the ready-made ones."""
    own = (project or home()) / "specs"
    made = ready.specs_dir()
    same = own.is_dir() and made.is_dir() and own.resolve() == made.resolve()
    return tuple(f.resolve() for f in ((own,) if same else (own, made)) if f.is_dir())


def python_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, sorted, without those whose names begin with a dot.

    Editors and systems write these: they may be links to nowhere (.#mine.py) or no text (._mine.py).
    """
    try:
        return sorted(f for f in folder.iterdir() if f.suffix == ".py" and not f.name.startswith(".") and f.is_file())
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """Return E417 with the system's message about a file or a folder."""
    return UserError("E417", path=relative(str(path)), why=error.strerror or str(error))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a folder that may not be searched, a name that is too long
        raise unreadable(path, error) from error


def _stems(folder: Path) -> list[str]:
    """Return the names of the modules in a folder, for hints; none where it cannot be read."""
    try:
        return [f.stem for f in python_files(folder)]
    except UserError:
        return []


def entries(project: Path | None = None) -> dict[str, SpecEntry]:
    """Return name -> Entry of every spec that can be named, sorted, without running a file.

    Raises UserError E412 for two specs of one name in one folder.
    """
    out: dict[str, SpecEntry] = {}
    own = ((project or home()) / "specs").resolve()
    for folder in reversed(folders(project)):
        found: dict[str, SpecEntry] = {}
        for file in python_files(folder):
            for name, place in declared(file) if file.name not in (PLANS_FILE, "__init__.py") else ():
                entry = SpecEntry(name, file, folder == own, place)
                if found.setdefault(name, entry) is not entry:
                    raise named_twice(name, (found[name].place, place))
        out |= found
    return dict(sorted(out.items()))


def named_twice(name: str, places: Iterable[Loc | None]) -> UserError:
    """Return E412 for specs of one function name."""
    return UserError("E412", loc=[place for place in places if place], what=f"the optimizer `{name}`")


def idle(project: Path | None = None) -> list[str]:
    """Return a warning about each file of the project's own specs/ that looks like one of specs and holds none."""
    own = (project or home()) / "specs"
    files = [f for f in python_files(own) if f.name != PLANS_FILE and f.name[0] != "_"] if own.is_dir() else []
    remedy = "nothing is built of it (write @optimizer above the rule; a helper's file name may begin with _)"
    return [f"{relative(str(file))} has no @optimizer: {remedy}" for file in files if not declared(file)]


def declared(file: Path) -> tuple[tuple[str, Loc], ...]:
    """Return name and place of the specs in a file, from its syntax tree: functions under `@optimizer`, and results of
    wrappers.

    A file that cannot be read is listed under its own name; loading it raises the error.
    """
    try:
        return _declared(file, file.stat().st_mtime_ns)
    except OSError:
        return ((file.stem, Loc(str(file), 1)),)


@lru_cache(maxsize=1024)
def _declared(file: Path, changed: int) -> tuple[tuple[str, Loc], ...]:
    tree = _tree(file)
    if tree is None:
        return ((file.stem, Loc(str(file), 1)),)
    known = {a.asname or a.name: a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    around = WRAPPERS | {n.name for n in tree.body if isinstance(n, _DEFINITIONS) and "wrapper" in _decorators(n)}
    names = ((_spec_of(n, known, around), Loc(str(file), n.lineno, n.col_offset)) for n in tree.body)
    return tuple((name, place) for name, place in names if name)


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)  # of which all but the first are refused


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    return {_name_of(d) for d in node.decorator_list}


def _spec_of(node: ast.stmt, known: dict[str, str], around: Set[str]) -> str:
    """Return the name of the spec that a statement makes, "" where it makes none.

    known   variable -> the name that it was imported under, or of the spec that it holds: of a wrapper's result, added
    """
    if isinstance(node, _DEFINITIONS):
        return node.name if "optimizer" in {known.get(d, d) for d in _decorators(node)} else ""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or _name_of(node.value) not in around:
        return ""
    target = _name_of(node.targets[0])
    known[target] = _wrapper_name(node.value, known, around) or target
    return "" if target.startswith("_") else known[target]


def _tree(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None


WRAPPERS = frozenset({"low_rank", *wrappers.__all__})
"""Functions of optgen.lang that make a spec of a spec."""


def _wrapper_name(made: ast.expr, known: Mapping[str, str], around: Set[str]) -> str:
    """Return the name that a wrapper gives to its spec, after the inner rule; "" where the text does not say."""
    if isinstance(made, ast.Call):
        inside = [*made.args[:1], *(k.value for k in made.keywords if k.arg == "inner")]
        inner = _wrapper_name(inside[0], known, around) if _name_of(made) in around and inside else ""
        return f"{_name_of(made)}_{inner}" if inner else ""
    return known.get(_name_of(made), _name_of(made))


def _name_of(node: ast.expr) -> str:
    """Return the name of a function, attribute or variable, or of the function that a call calls; else ""."""
    f = node.func if isinstance(node, ast.Call) else node
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


# -- specs


def find_spec(reference: str | Path, project: Path | None = None) -> Spec:
    """Return the spec of that name, in that file ("specs/mine.py"), or of that name in that file ("mine.py:rule"), or
    of wrappers around one: "ema(cautious(adamw))"."""
    around, _, inner = str(reference).partition("(")
    if around in wrappers.__all__ and inner.endswith(")"):
        return _wrapped(around, find_spec(inner[:-1], project))
    path, name = _split(reference)
    if path is None:
        known = entries(project)
        if name not in known:
            hint = did_you_mean(around, wrappers.__all__) if inner else did_you_mean(name, known)
            hint = f"write {name})" if inner and around in wrappers.__all__ else hint
            written = 'in a file of specs/: low_rank(muon, "momentum_buffer", when="matrix and not adamw")'
            raise UserError("E404", kind="spec", name=name, hint=written if around == "low_rank" else hint)
        path = known[name].file
    return _pick(_of(path, Spec), name, path, "spec")


@lru_cache(maxsize=256)
def _wrapped(name: str, inner: Spec) -> Spec:
    made: Spec = getattr(wrappers, name)(inner, loc=inner.loc)
    return made


def find_plan(reference: str | Path, project: Path | None = None) -> Plan:
    """Return the plan of that name, in that file, or of that name in that file."""
    path, name = _split(reference)
    if path is not None:
        return _pick(_of(path, Plan), name, path, "plan")
    known = plans(project)
    if name not in known:
        raise UserError("E404", kind="plan", name=name, hint=did_you_mean(name, known))
    return known[name]


def plans(project: Path | None = None) -> dict[str, Plan]:
    """Return name -> plan: the ready-made ones in their order, then those that the project's specs/plans.py adds."""
    out: dict[str, Plan] = {}
    for folder in reversed(folders(project)):
        file = folder / PLANS_FILE
        for name, plan in _of(file, Plan).items() if _is_file(file) else ():
            if name in out:  # groups and checkpoints have the name alone
                raise UserError("E412", loc=plan.loc, what=f"the plan `{name}`", note="one of them is ready-made")
            _check_overrides(plan, project)
            out[name] = plan
    return out


def _check_overrides(plan: Plan, project: Path | None) -> None:
    """Raise E310 for an override of a state that no rule has: it would change nothing."""
    if plan.overrides and (unknown := set(plan.overrides) - _arguments(project)):
        name = min(unknown)
        raise UserError("E310", loc=plan.loc, plan=plan.name, state=name, hint=did_you_mean(name, _arguments(project)))


def _arguments(project: Path | None) -> set[str]:
    """Return the arguments of functions in all files of specs, and of wrappers: states are among them."""
    files = {entry.file for entry in entries(project).values()} | {Path(wrappers.__file__)}
    return {name for file in files for name in _arguments_of(file, file.stat().st_mtime_ns)}


@lru_cache(maxsize=1024)
def _arguments_of(file: Path, changed: int) -> frozenset[str]:
    tree = _tree(file)
    return frozenset() if tree is None else frozenset(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg))


def _split(reference: str | Path) -> tuple[Path | None, str]:
    """Return (file, name): file is None for a bare name, name is "" where the file alone is given."""
    text = str(reference)
    head, _, name = text.rpartition(":") if ".py:" in text else (text, "", "")
    if not head.endswith(".py") and not isinstance(reference, Path) and "/" not in text:
        return None, text
    path = Path(head)
    if not _is_file(path):
        near = [f"{stem}.py" for stem in _stems(path.parent)]
        raise UserError("E404", kind="file", name=relative(str(path)), hint=did_you_mean(path.name, near))
    if path.suffix != ".py":
        raise UserError("E417", path=relative(str(path)), why="specs and plans are Python files, NAME.py")
    return path.resolve(), name


def _of(file: Path, kind: type[SpecOrPlan]) -> dict[str, SpecOrPlan]:
    """Return name -> specs or plans that the file defines, in its order, without those that it imports."""
    out: dict[str, SpecOrPlan] = {}
    written = declared(file)
    for name, _ in written:
        places = [place for other, place in written if other == name]
        if len(places) > 1:  # Python keeps the last one only
            raise named_twice(name, places)
    for key, value in vars(load(file)).items():
        if isinstance(value, kind) and not key.startswith("_"):
            if value.loc is not None and Path(value.loc.file).resolve() != file:
                continue  # imported
            if isinstance(value, Plan):
                value.check_name()
            elif value is not out.get(value.name, value):
                raise named_twice(value.name, (out[value.name].loc, value.loc))
            out.setdefault(value.name, value)
    return out


def _pick(found: dict[str, SpecOrPlan], name: str, file: Path, kind: str) -> SpecOrPlan:
    where = relative(str(file))
    if not found:
        remedy = "a spec is a function under @optimizer(...)" if kind == "spec" else "a plan is name = Plan(...)"
        raise UserError("E403", file=where, kind=kind, remedy=remedy)
    if not name:
        if len(found) > 1:
            raise UserError("E405", file=where, kind=kind, names=", ".join(found), first=next(iter(found)))
        return next(iter(found.values()))
    if name not in found:
        raise UserError("E404", kind=f"{kind} in {where}", name=name, hint=did_you_mean(name, found))
    return found[name]


# -- files

_loaded: dict[Path, tuple[int, int, ModuleType]] = {}


def load(file: Path) -> ModuleType:
    """Return the module of a file, run once while the file does not change. Raises UserError for errors in it."""
    file = file.resolve()
    try:
        stat = file.stat()
        kept = _loaded.get(file)
        if kept is not None and kept[:2] == (stat.st_mtime_ns, stat.st_size):
            return kept[2]
        text = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    # The name is private: a project's plans.py and the ready-made one are both loaded.
    name = f"_optgen_file_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    made = importlib.util.spec_from_file_location(name, file)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    forget(str(file))
    with _neighbours(file):
        sys.modules[name] = module
        try:
            check_encoding(str(file), text)
            code = compile(text, str(file), "exec", dont_inherit=True)
            exec(code, module.__dict__)
        except BaseException as error:
            sys.modules.pop(name, None)
            if isinstance(error, UserError) or not isinstance(error, (Exception, SystemExit)):
                raise
            raise _as_user_error(error, file) from error
    _loaded[file] = (stat.st_mtime_ns, stat.st_size, module)
    return module


@contextlib.contextmanager
def _neighbours(file: Path) -> Iterator[None]:
    """Let a file import those beside it, as `helper` or as `specs.helper`, and the ready-made ones as `specs.adamw`.

    They are last on the path, and shadow nothing. Modules of `specs` are forgotten afterwards, and those that there
    were come back: each project finds its own.
    """
    path, package, before = list(sys.path), ModuleType("specs"), _without_specs()
    try:
        sys.path += [str(file.parent), str(file.parent.parent)]
        package.__path__ = [str(file.parent.parent / "specs"), str(file.parent / "specs"), str(ready.specs_dir())]
        sys.modules["specs"] = package
        yield
    finally:
        sys.path[:] = path
        _without_specs()
        sys.modules.update(before)


def _without_specs() -> dict[str, ModuleType]:
    """Remove `specs` and its modules from the imported ones, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "specs"}


def _place(error: SyntaxError, file: str) -> Loc:
    """Return the place of a syntax error.

    Python counts columns in bytes of UTF-8 once it has a tree (`return` outside of a function), and before in
    characters of a text; of a file, in either. So the file is parsed again, as a text.
    """
    make: Callable[..., Loc] = Loc
    try:
        ast.parse("".join(linecache.getlines(file)))
    except SyntaxError as again:
        error, make = again, of_characters
    line, column = error.lineno or 1, max((error.offset or 1) - 1, 0)
    return make(file, line, column, error.end_lineno or line, max((error.end_offset or 0) - 1, column))


def _as_user_error(error: Exception | SystemExit, file: Path) -> UserError:
    """Return E401 or E402 for an error in a user's file, with its place."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return UserError("E401", loc=_place(error, error.filename), text=f"{type(error).__name__}: {error.msg}")
    if isinstance(error, (SyntaxError, ValueError)) and error.__traceback__ and error.__traceback__.tb_next is None:
        return UserError("E401", loc=Loc(str(file), 1), text=str(error))  # null bytes, a wrong encoding
    place = Loc(str(file), 1)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename).parent == file.parent:
            place = of_frame(frame)
    text = said(error)
    kind = type(error).__name__
    return UserError("E402", loc=place, kind=kind, text=text or "no message", hint=_hint_for(error, file))


def _hint_for(error: Exception | SystemExit, file: Path) -> str:
    """Return the hint for an error: a name like the missing one, or what to write instead; "" where none is known."""
    match error:
        case SystemExit():
            return 'a file of specs is no program: what ends it belongs under `if __name__ == "__main__":`'
        case NameError(name=str(name)):
            return _home(name) or _close(name, optgen.lang.__all__)
        case ImportError():
            return _import_hint(error, file)
        case AttributeError():
            return _close_in(error.obj, error.name or "")
        case TypeError() if "unexpected keyword argument 'shape'" in str(error):
            kinds = "state(), row(), col(), mat(), tensor_state(), scalar()"
            return f"states of other shapes do not exist (yet): there are {kinds}"
        case TypeError():
            return _usage(str(error))
    return ""


def _import_hint(error: ImportError, file: Path) -> str:
    if "relative import" in str(error):
        return "a file beside this one is imported by its name alone: from helper import ..."
    if isinstance(error, ModuleNotFoundError) and error.name:
        package, _, module = error.name.rpartition(".")
        return _close(module, _stems(file.parent) if package in ("", file.parent.name) else [])
    words = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    name, source = (words[1], sys.modules.get(words[2])) if words else ("", None)
    ours = instead_of(name) if source is optgen.lang else ""
    if ours and not ours.startswith(f"use {name}("):
        return ours
    if name in dir(builtins) and source in (optgen.lang, optgen.formats):
        return f"`{name}` is Python's own: it needs no import"
    home = _home(name) if source in (optgen.lang, optgen.formats, policies) else ""
    return home or _close_in(source, name)


def _close_in(source: object, name: str) -> str:
    """Return a hint for a name that a module does not have."""
    known = [n for n in dir(source) if not n.startswith("_")] if isinstance(source, ModuleType) else []
    functions = f"functions of one or two values are {FUNCTIONS}" if source is optgen.lang else ""
    return _close(name, known) or functions


def _close(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" for a name that is like a known one, else ""."""
    near = did_you_mean(name, known)
    return near if near.startswith("did you mean") else ""


def _home(name: str) -> str:
    """Return the import of a name of optgen's; "" for any other."""
    for module in (optgen.lang, optgen.formats):
        if name in module.__all__:
            return f"from {module.__name__} import {name}"
    own = getattr(getattr(policies, name, None), "__module__", "") == policies.__name__
    return f"from {policies.__name__} import {name}" if own and not name.startswith("_") else ""


def _usage(text: str) -> str:
    """Return the signature of optgen's function that a TypeError's text begins with; "" for any other."""
    words = re.match(r"(\w+)(?:\.__init__)?\(\) (?:got|missing|takes)", text)
    name = words[1] if words else ""
    found = next((vars(m)[name] for m in (optgen.lang, optgen.formats) if name in m.__all__), None)
    if not callable(found):
        return ""
    taken = [p for p in inspect.signature(found).parameters.values() if p.name != "function"]  # which is decorated
    plain = (bool, int, float, str, NoneType, type)  # none is a type; the text of an object is long
    parts = [str(p.replace(annotation=p.empty)) if isinstance(p.default, plain) else f"{p.name}=..." for p in taken]
    return f"{name}({', '.join(parts)})"
