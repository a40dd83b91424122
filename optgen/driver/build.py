"""`optgen build`: specs x plans -> the generated package, all of it or nothing.

The folder is generated as a whole. All text is generated before anything is written. `swap` replaces the files, and a
build that fails leaves the old ones. MANIFEST.json holds the hash of every file, so that one edited by hand is never
overwritten, and one that is no longer built is removed. The same sources give the same bytes: no dates, hosts, absolute
paths or hash order.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from optgen.base import ready
from optgen.base.collecting import uncollected
from optgen.base.errors import UserError
from optgen.base.loc import relative
from optgen.driver import emit, judge, load, swap, targets
from optgen.driver.plan_formats import PLANS
from optgen.driver.project import DEFAULT_PLANS, Config, Maths, Pairing, once, plan_wishes, read_config, wishes
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec

MANIFEST = "MANIFEST.json"
INIT = "__init__.py"
HASHES = "HASHES"

Files = dict[str, str]
"""Path below the generated folder -> text."""
Job = Callable[[], Files]


@dataclass(frozen=True)
class Request:
    """The arguments of a build; `names` under `plans` are built in the place of what the project's table asks for."""

    names: tuple[str, ...] = ()
    plans: tuple[str, ...] = DEFAULT_PLANS
    out: str = ""
    check: bool = False
    project: Path = field(default_factory=load.home)


@dataclass
class Outcome:
    """The changes that a build made, or with `check` would make."""

    out: str
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
    edited: list[str] = field(default_factory=list)  # would change, and are not as a build wrote them
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    diff: str = ""
    classes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.written and not self.removed


def read_manifest(out: Path) -> dict[str, str]:
    """Return the hashes of a folder's files by name; {} where it has no manifest.

    E415 for a manifest that optgen did not write: files that it lists may be removed, and none may lie outside.
    """
    file = out / MANIFEST
    try:
        files = dict(json.loads(file.read_text(encoding="utf-8"))["files"])
        for name in files:
            if not (out / name).resolve().is_relative_to(out.resolve()):
                raise ValueError(f"it lists {name!r}, which is not in this folder")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("E415", file=relative(str(file)), why=str(error)) from error
    return files


def manifest_text(files: Mapping[str, str], units: Mapping[str, Mapping[str, str]]) -> str:
    """Return the manifest: hashes of files, and of the sources of specs, which the runtime compares at an import."""
    parts = {"files": {name: digest(text.encode()) for name, text in sorted(files.items())}, "specs": units}
    rows = ((k, (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in part.items())) for k, part in parts.items())
    return "{\n" + ",\n".join(f'"{k}": {{\n' + ",\n".join(lines) + "\n}" for k, lines in rows) + "\n}\n"


def digest(data: bytes) -> str:
    """Return the content hash of a file, line ends normalised (git may change them)."""
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()[:32]


# -- units


@dataclass(frozen=True)
class Unit:
    """A spec, and the plans under which it is generated."""

    spec: Spec
    plans: tuple[Plan, ...]


@uncollected()
def build(request: Request) -> Outcome:
    """Build or check a project. Raises UserError before anything is changed."""
    config, project = read_config(request.project), request.project
    out = _folder(request, config)
    known = read_manifest(out)
    outcome = Outcome(relative(str(out)), warnings=load.idle(project))
    units = _units(request, config, outcome)
    outcome.classes = sorted(u.spec.class_name for u in units)
    hashed = hash_jobs(config, project) if config.hashes and not request.names else {}
    files: Files = {}
    for job in (*_jobs(units, config.maths), *hashed.values()):
        files |= job()
    if hashed:
        files[HASHES] = "".join(f"{name} {files.pop(f'{HASHES}/{name}')}\n" for name in hashed)
    files[INIT] = init_text(_distinct(units))
    files[MANIFEST] = manifest_text(files, {u.spec.name: _sources(u, out, project) for u in units})
    _compare(out, files, known, outcome)
    if not request.check:
        _write(out, files, outcome)
    return outcome


def _folder(request: Request, config: Config) -> Path:
    """Return the folder to build. Raises E413 where it cannot be one."""
    out = Path.cwd() / request.out if request.out else request.project / config.out
    try:
        if out.exists() and not out.is_dir():
            raise _not_written(relative(str(out)), "it is not a folder")
    except OSError as error:  # a name that is too long
        raise _not_written(request.out or config.out, error.strerror or str(error)) from error
    return out


def _units(request: Request, config: Config, outcome: Outcome) -> list[Unit]:
    """Return the units of a build in the order of their names."""
    project = request.project
    found: dict[str, tuple[Spec, dict[str, Plan]]] = {}
    asked = once([w for name in request.names for w in plan_wishes(name, request.plans, project)])
    for wish in asked or wishes(project, config):
        spec, plan = load.find_spec(wish.spec, project), load.find_plan(wish.plan, project)
        first, plans = found.setdefault(spec.name, (spec, {}))
        if first.loc.file != spec.loc.file:
            raise load.named_twice(spec.name, (first.loc, spec.loc))
        if _accepted(spec, plan, wish, outcome):
            plans[plan.name] = plan
    if not found:
        raise UserError("E414", note="; ".join(outcome.warnings)) if outcome.warnings else UserError("E414")
    order = {name: k for k, name in enumerate(load.plans(project))}
    units = []
    for _, (spec, plans) in sorted(found.items()):
        names = sorted(plans, key=lambda name: order.get(name, len(order)))
        units += [Unit(spec, tuple(plans[name] for name in names))] * bool(names)
    return units


def _accepted(spec: Spec, plan: Plan, wish: Pairing, outcome: Outcome) -> bool:
    """Return True if a pair is built. Leaves out a pair of a pattern that does not fit; raises UserError for others."""
    spec.check()
    try:
        judge.judge(spec, plan)
    except UserError as error:
        if not wish.optional or not error.code.startswith("E3"):
            raise
        outcome.skipped.append(f"{spec.name} under {plan.name}: {error.message}")
        return False
    return True


def _sources(unit: Unit, out: Path, project: Path) -> dict[str, str]:
    """Return the hashes of a unit's files that are the project's own, by their path from the generated folder."""
    root, folder, made = project.resolve(), out.resolve(), ready.specs_dir().resolve()
    if not folder.is_relative_to(root):  # such a folder has no path to the project that holds on another machine
        return {}
    places = [unit.spec.loc, *(plan.loc for plan in unit.plans)]
    files = dict.fromkeys(Path(place.file).resolve() for place in places)
    own = [f for f in files if f.is_relative_to(root) and (made == root / "specs" or not f.is_relative_to(made))]
    return {Path(os.path.relpath(file, folder)).as_posix(): targets.digest(str(file)) for file in own}


def _distinct(units: Sequence[Unit]) -> dict[str, str]:
    """Return class name -> spec, E412 for two of one name."""
    seen: dict[str, str] = {}
    for spec in (unit.spec for unit in units):
        if (other := seen.setdefault(spec.class_name, spec.name)) != spec.name:
            raise UserError("E412", what=f"the class {spec.class_name}", note=f"they are {other} and {spec.name}")
    return seen


# -- generating


def _jobs(units: Sequence[Unit], maths: Maths) -> list[Job]:
    """Return the functions that generate the packages of plans and of rules."""
    plans = {plan.name: plan for u in units for plan in u.plans}
    jobs: list[Job] = [partial(_inside, f"{PLANS}/{k}", partial(emit.plan_files, x, maths)) for k, x in plans.items()]
    return jobs + [partial(_inside, u.spec.name, partial(_rule, u, maths)) for u in units]


def hash_jobs(config: Config, project: Path) -> dict[str, Job]:
    """Return the functions that hash the text of each of the project's own plans, and rules under all plans."""
    plans, file = load.plans(project), (project / "specs" / load.PLANS_FILE).resolve()
    own = {name: plan for name, plan in plans.items() if plan.loc and Path(plan.loc.file).resolve() == file}
    made: dict[str, Job] = {f"{PLANS}/{k}": partial(emit.plan_files, plan, config.maths) for k, plan in own.items()}
    for name in (name for name, entry in load.entries(project).items() if entry.own):
        made[name] = partial(emit.rule_files, load.find_spec(name, project), tuple(plans), config.maths)
    return {name: partial(_hashed, name, make) for name, make in made.items()}


def _hashed(name: str, make: Job) -> Files:
    text = "".join(f"{file}\0{text}\0" for file, text in sorted(make().items()))
    return {f"{HASHES}/{name}": digest(text.encode())}


def _rule(unit: Unit, maths: Maths) -> Files:
    """Return the files of a rule, of the stub of its class, and of what the lint finds about its plans."""
    files = emit.rule_files(unit.spec, tuple(plan.name for plan in unit.plans), maths) | emit.class_stub(unit.spec)
    for plan in unit.plans:
        files |= _inside(plan.name, partial(emit.findings_files, unit.spec, plan))
    return files


def _inside(folder: str, make: Job) -> Files:
    """Return the files that a job makes as those of a folder."""
    return {f"{folder}/{name}": text for name, text in make().items()}


# Its imports are private names: modules and classes of specs stand beside them.
_INIT_TEXT = '''"""Generated optimizers; each is imported when it is first asked for."""
# @generated by optgen: `optgen build` writes this folder, MANIFEST.json says what is in it.
# fmt: off
# ruff: noqa
from __future__ import annotations

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
{imports}

_MODULES = {{
{rows}
}}

__all__ = [
{names}
]


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        text = f"{{__name__}} has no optimizer {{name!r}}; it has: {{', '.join(__all__)}}"
        imported = _sys._getframe(1).f_code.co_name == "_handle_fromlist"  # it replaces the text of an AttributeError
        raise ImportError(text) if imported and name not in _MODULES.values() else AttributeError(text)
    _import_module("optgen.runtime.stale").check(__path__[0], _MODULES[name])
    return getattr(_import_module(f"{{__name__}}.{{_MODULES[name]}}"), name)


def __dir__() -> list[str]:
    return __all__
'''


def init_text(classes: Mapping[str, str]) -> str:
    """generated/__init__.py: class name -> module, imported when asked for (PEP 562)."""
    lines = {"imports": "    from .{1} import {0} as {0}", "rows": '    "{0}": "{1}",', "names": '    "{0}",'}
    ordered = sorted(classes.items())
    return _INIT_TEXT.format(**{k: "\n".join(line.format(*pair) for pair in ordered) for k, line in lines.items()})


# -- comparing and writing


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().replace(b"\r\n", b"\n").decode("utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError("E413", path=relative(str(path)), why=error.strerror) from error


def _compare(out: Path, files: Mapping[str, str], known: Mapping[str, str], outcome: Outcome) -> None:
    """Record the differences between the folder and the files; `known`: hashes of those that the last build wrote."""
    diff: list[str] = []
    for name in sorted({*files, *known}):
        old, new = _read(out / name), files.get(name)
        if old == new:
            outcome.unchanged += old is not None
            continue
        (outcome.written if new is not None else outcome.removed).append(name)
        if old and old.strip() and name != MANIFEST:
            outcome.edited += [name] * (digest(old.encode()) != known.get(name))
        a, b = f"{outcome.out}/{name}", f"{outcome.out}/{name} (built)"
        lines = difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), a, b)
        diff += [line if line.endswith("\n") else line + "\n" for line in lines]
    outcome.diff = "".join(diff)


def _write(out: Path, files: Mapping[str, str], outcome: Outcome) -> None:
    """Write the files that differ, all or none, the manifest last. Raises E406 for those that were edited."""
    if outcome.clean:
        return
    if outcome.edited:
        more = f" and {len(outcome.edited) - 3} more" if outcome.edited[3:] else ""
        raise UserError("E406", out=outcome.out, names=", ".join(outcome.edited[:3]) + more)
    try:
        swap.replace_files(out, {name: files[name] for name in outcome.written}, outcome.removed, MANIFEST)
        _drop_empty(out, outcome.removed)
    except OSError as error:
        place = error.filename2 or error.filename or out
        raise _not_written(relative(str(place)), error.strerror or str(error)) from error


def _not_written(path: str, why: str) -> UserError:
    return UserError("E413", path=f"{path:.80}", why=why, hint="--out FOLDER writes to another folder")


def _drop_empty(out: Path, removed: Sequence[str]) -> None:
    """Remove folders of removed files that hold nothing else but compiled Python."""
    folders = {p for name in removed for p in (out / name).parents if p != out and p.is_relative_to(out)}
    for folder in sorted(folders, key=lambda p: -len(p.parts)):
        if folder.is_dir() and not folder.is_symlink() and all(p.name == "__pycache__" for p in folder.iterdir()):
            shutil.rmtree(folder)
