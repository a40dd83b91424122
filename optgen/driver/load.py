"""Find and load specs and plans: the user's own first, then the ready-made ones.

A name is looked for in the project's `specs/` folder, then among the ready-made specs, each in the file of its name;
`file.py` is the one in that file, and `file.py:name` one of several. A spec is Python: loading a file runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import optgen.formats
import optgen.lang
from optgen.base import ready
from optgen.base.errors import UserError, did_you_mean, said
from optgen.base.loc import Loc, of_characters, of_frame, relative
from optgen.formats.plan import Plan
from optgen.lang import wrappers
from optgen.lang.source import forget
from optgen.lang.spec import Spec

PLANS_FILE = "plans.py"

SpecOrPlan = TypeVar("SpecOrPlan", Spec, Plan)


@dataclass(frozen=True)
class SpecEntry:
    """A spec that can be named: its name, its file, and whether the file is the project's own."""

    name: str
    file: Path
    own: bool


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
    """Return name -> Entry of every spec that can be named, sorted.

    Files of a project are run; one with an error is listed under its own name. Raises UserError E412 for two specs of
    one name in one folder.
    """
    out: dict[str, SpecEntry] = {}
    own = ((project or home()) / "specs").resolve()
    for folder in reversed(folders(project)):
        found: dict[str, tuple[SpecEntry, Loc | None]] = {}
        for file in (f for f in python_files(folder) if f.name not in (PLANS_FILE, "__init__.py")):
            for name, place in _declared(file).items():
                entry = SpecEntry(name, file, folder == own)
                if found.setdefault(name, (entry, place))[0] is not entry:
                    raise named_twice(name, (found[name][1], place))
        out |= {name: entry for name, (entry, _) in found.items()}
    return dict(sorted(out.items()))


def _declared(file: Path) -> dict[str, Loc | None]:
    """Return name -> place of the specs in a file of a folder of specs."""
    if file.parent == ready.specs_dir().resolve():
        return {file.stem: None}
    try:
        return {name: spec.loc for name, spec in _of(file, Spec).items()}
    except UserError as error:
        if error.code == "E412":
            raise
        return {file.stem: Loc(str(file), 1)}


def named_twice(name: str, places: Iterable[Loc | None]) -> UserError:
    """Return E412 for specs of one function name."""
    return UserError("E412", loc=[place for place in places if place], what=f"the optimizer `{name}`")


def idle(project: Path | None = None) -> list[str]:
    """Return a warning about each file of the project's own specs/ that looks like one of specs and holds none."""
    own = ((project or home()) / "specs").resolve()
    files = [f for f in python_files(own) if f.name != PLANS_FILE and f.name[0] != "_"] if own.is_dir() else []
    remedy = "nothing is built of it (write @optimizer above the rule; a helper's file name may begin with _)"
    return [f"{relative(str(file))} has no @optimizer: {remedy}" for file in files if not _declared(file)]


# -- specs


def find_spec(reference: str | Path, project: Path | None = None) -> Spec:
    """Return the spec of that name, in that file ("specs/mine.py"), or of that name in that file ("mine.py:rule"), or
    of wrappers around one: "ema(cautious(adamw))"."""
    around, _, inner = str(reference).partition("(")
    if around in wrappers.__all__ and inner.endswith(")"):
        return _wrapped(around, find_spec(inner[:-1], project))
    path, name = _split(reference)
    if path is None and (path := _ready_made(name, project)) is None:
        known = entries(project)
        if name not in known:
            hint = did_you_mean(around, wrappers.__all__) if inner else did_you_mean(name, known)
            hint = f"write {name})" if inner and around in wrappers.__all__ else hint
            written = 'in a file of specs/: low_rank(muon, "momentum_buffer", when="matrix and not adamw")'
            raise UserError("E404", kind="spec", name=name, hint=written if around == "low_rank" else hint)
        path = known[name].file
    return _pick(_of(path, Spec), name, path, "spec")


def _ready_made(name: str, project: Path | None) -> Path | None:
    """Return the file of a ready-made rule whose name no file of the project has, so that none is run to find it."""
    file, own = ready.specs_dir().resolve() / f"{name}.py", ((project or home()) / "specs").resolve()
    files = python_files(own) if own.is_dir() and own != file.parent else []
    texts = (f.read_text(encoding="utf-8", errors="replace") for f in files)
    # The name of a rule around another is made of both: clipped(adamw) is clipped_adamw.
    is_there = any(all(part in text for part in name.split("_")) for text in texts)
    return file if _is_file(file) and not is_there else None


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
    """Return the arguments that have a default, in all files of specs and of wrappers: states are among them."""
    files = {entry.file for entry in entries(project).values()} | {Path(wrappers.__file__)}
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return {name for text in texts for name in re.findall(r"(\w+)=", text)}


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


def _as_user_error(error: Exception | SystemExit, file: Path) -> UserError:
    """Return E401 or E402 for an error in a user's file, with its place."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        line, column = error.lineno, max((error.offset or 1) - 1, 0)
        end = error.end_lineno or line, max((error.end_offset or 0) - 1, column)
        place = of_characters(error.filename, line, column, *end)
        return UserError("E401", loc=place, text=f"{type(error).__name__}: {error.msg}")
    if isinstance(error, (SyntaxError, ValueError)) and error.__traceback__ and error.__traceback__.tb_next is None:
        return UserError("E401", loc=Loc(str(file), 1), text=str(error))  # null bytes, a wrong encoding
    place = Loc(str(file), 1)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if Path(frame.f_code.co_filename).parent == file.parent:
            place = of_frame(frame)
    text = said(error)
    kind = type(error).__name__
    return UserError("E402", loc=place, kind=kind, text=text or "no message", hint=_hint_for(error))


def _hint_for(error: Exception | SystemExit) -> str:
    """Return the hint for a name that Python did not find; "" for any other error."""
    match error:
        case NameError(name=str(name)):
            return did_you_mean(name, optgen.lang.__all__)
        case ImportError(name="optgen.lang") if words := re.match(r"cannot import name '(\w+)'", str(error)):
            return did_you_mean(words[1], optgen.lang.__all__)
    return ""
