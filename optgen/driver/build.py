"""`optgen build`: specs x plans -> the generated package, all of it or nothing.

The folder of a rule is generated as a whole. All text is generated before anything is written. `swap` replaces the
files, and a build that fails leaves the old ones. MANIFEST.json holds the hash of every file, so that one edited by
hand is never overwritten, and one that is no longer built is removed. The same sources give the same bytes: no dates,
hosts, absolute paths or hash order.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from optgen.base import ready
from optgen.base.collecting import uncollected
from optgen.base.errors import UserError
from optgen.base.loc import relative
from optgen.driver import emit, judge, load, swap, targets
from optgen.driver.plan_formats import PLANS
from optgen.driver.project import DEFAULT_PLANS, Config, Maths, Pairing, once, placed, plan_wishes, read_config, wishes
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec

MANIFEST = "MANIFEST.json"
INIT = "__init__.py"
HASHES = "HASHES"
PROCESSES = 2  # more would not help: half of the time is spent on the start of one process and on reading specs
MANY_JOBS = 4

Files = dict[str, str]
"""Path below the generated folder -> text."""
Job = Callable[[], Files]
Track = Callable[[Iterable[Files], int], Iterator[Files]]


@dataclass(frozen=True)
class Request:
    """The arguments of a build; None and () where the command line has none."""

    names: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    out: str | None = None
    maths: Maths | None = None
    check: bool = False
    project: Path = field(default_factory=load.home)

    def __post_init__(self) -> None:
        if self.out == "":
            raise UserError("E411", option="--out", want="the name of a folder", got="", hint="--out generated")

    @property
    def named(self) -> bool:
        """Return True if specs or plans are named: the folders of other rules stay as they are."""
        return bool(self.names or self.plans)


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
    packages: list[str] = field(default_factory=list)  # generated now: "adamw/int8_split24"
    classes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.written and not self.removed


@dataclass(frozen=True)
class Built:
    """A spec in the manifest.

    reference  the name or file that it is found by from the project's folder
    sources    the project's files that it was generated from, by their path from the generated folder, with their
               hashes; the runtime compares them as its class is imported
    maths      of its kernels and of its plans', which rules share
    """

    class_name: str
    reference: str
    plans: Sequence[str]
    sources: Mapping[str, str]
    maths: Maths


@dataclass(frozen=True)
class Manifest:
    """The contents of a generated folder: the hash of each file, and the specs."""

    files: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, Built] = field(default_factory=dict)

    def plans(self, spec: str) -> Sequence[str]:
        return self.specs[spec].plans if spec in self.specs else ()

    def text(self) -> str:
        parts = ((k, (f"{json.dumps(name)}: {json.dumps(x)}" for name, x in sorted(part.items())))
                 for k, part in asdict(self).items())  # fmt: skip
        return "{\n" + ",\n".join(f'"{k}": {{\n' + ",\n".join(rows) + "\n}" for k, rows in parts) + "\n}\n"


def read_manifest(out: Path) -> Manifest:
    """Return the folder's manifest, an empty one where there is none. Raises E415 for one that optgen did not write.

    Files that it lists may be removed later: none may lie outside of the folder.
    """
    file = out / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        manifest = Manifest(dict(data["files"]), {name: Built(**row) for name, row in data["specs"].items()})
    except (FileNotFoundError, NotADirectoryError):
        return Manifest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, OSError | ValueError) else "it is not one that optgen wrote"
        raise UserError("E415", file=relative(str(file)), why=why) from error
    for name in manifest.files:
        if not swap.is_name(name):
            why = f"it lists {name!r}, which is not how optgen names a file of this folder"
            raise UserError("E415", file=relative(str(file)), why=why)
    return manifest


def digest(data: bytes) -> str:
    """Return the content hash of a file, line ends normalised (git may change them)."""
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()[:32]


# -- units


@dataclass(frozen=True)
class Unit:
    """A spec, and the plans under which it is generated."""

    spec: Spec
    reference: str
    plans: tuple[Plan, ...]

    def built(self, out: Path, project: Path, maths: Maths) -> Built:
        """Return the unit's entry in the manifest of a folder."""
        plans = [p.name for p in self.plans]
        return Built(self.spec.class_name, self.reference, plans, _sources(self, out, project), maths)


@uncollected()
def build(request: Request, track: Track | None = None) -> Outcome:
    """Build or check the requested pairs. Raises UserError before anything is changed."""
    config = read_config(request.project)
    out = _folder(request, config)
    manifest = read_manifest(out)
    outcome = Outcome(relative(str(out)), warnings=load.idle(request.project))
    units = _units(request, config, manifest, outcome)
    outcome.packages = [f"{u.spec.name}/{plan.name}" for u in units for plan in u.plans]
    outcome.classes = sorted(u.spec.class_name for u in units)
    maths = request.maths or config.maths
    specs = {u.spec.name: u.built(out, request.project, maths) for u in units}
    if request.named:
        _refuse_other_maths(manifest, specs, maths)
    files, others = _texts(units, request, config, maths, track), dict[str, str]()
    if request.named:
        specs, folders = {**manifest.specs, **specs}, {_package(name) for name in files}
        others = {name: digest for name, digest in manifest.files.items() if _package(name) not in folders}
    files[INIT] = init_text(_distinct(specs))
    stale = _removable(out, set(manifest.files) - set(others) - set(files), outcome)
    files[MANIFEST] = Manifest(others | {k: digest(v.encode()) for k, v in files.items()}, specs).text()
    _compare(out, files, stale, manifest, outcome)
    if not request.check:
        _write(out, files, outcome)
    return outcome


def _texts(units: Sequence[Unit], request: Request, config: Config, maths: Maths, track: Track | None) -> Files:
    """Generate the packages of rules and plans, and the hashes where a project has them."""
    hashed = hash_jobs(config, request.project) if config.hashes and not request.named else {}
    files = _generate([*_jobs(units, maths, request.backends or config.backends), *hashed.values()], track)
    if hashed:
        files[HASHES] = "".join(f"{name} {files.pop(f'{HASHES}/{name}')}\n" for name in hashed)
    return files


def _refuse_other_maths(manifest: Manifest, specs: Mapping[str, Built], maths: Maths) -> None:
    """Raise E411 where a rule that stays as it is shares plans with those that are built in other maths."""
    for name, built in manifest.specs.items():
        if name not in specs and built.maths != maths:
            want = f"{built.maths}, as that of {name}, whose plans these rules share"
            raise UserError("E411", option="maths", want=want, got=maths, hint="build all that the folder has")


def _removable(out: Path, gone: set[str], outcome: Outcome) -> list[str]:
    """Return the files that may be removed: none that a link leads to, outside of the folder."""
    inside = [name for name in sorted(gone) if swap.is_inside(out, name)]
    why = "is no longer built, but not removed: its folder is a link to a place outside"
    outcome.warnings += [f"{outcome.out}/{name} {why}" for name in sorted(gone.difference(inside))]
    return inside


def _folder(request: Request, config: Config) -> Path:
    """Return the folder to build. Raises E413 where it cannot be one."""
    out = Path.cwd() / request.out if request.out is not None else request.project / config.out
    try:
        if out.exists() and not out.is_dir():
            raise _not_written(relative(str(out)), "it is not a folder")
    except OSError as error:  # a name that is too long
        raise _not_written(request.out or config.out, error.strerror or str(error)) from error
    return out


def _package(name: str) -> str:
    """Return the folder of a file that is replaced as a whole: of a rule, or of a plan."""
    return "/".join(name.split("/")[: 2 if name.startswith(f"{PLANS}/") else 1])


def _units(request: Request, config: Config, manifest: Manifest, outcome: Outcome) -> list[Unit]:
    """Return the units of a build in the order of their names."""
    project = request.project
    found: dict[str, tuple[Spec, str, dict[str, Plan]]] = {}
    for wish in _requested(request, config, manifest):
        spec, plan = load.find_spec(wish.spec, project), load.find_plan(wish.plan, project)
        first, _, plans = found.setdefault(spec.name, (spec, wish.spec, {}))
        if first.loc.file != spec.loc.file:
            raise load.named_twice(spec.name, (first.loc, spec.loc))
        if _accepted(spec, plan, wish, outcome):
            plans[plan.name] = plan
    if not found:
        raise _nothing_to_build(request, config)
    known = list(load.plans(project))
    units = []
    for name, (spec, asked, plans) in sorted(found.items()):
        reference = _reference(asked, spec, project)
        if name in manifest.specs:
            outcome.warnings += _changes(f"{outcome.out}/{name}", manifest.specs[name], reference, {*known, *plans})
        order = [p for p in known if p in plans] + sorted(set(plans) - set(known))
        if plans:
            units.append(Unit(spec, reference, tuple(plans[p] for p in order)))
    return units


def _changes(folder: str, before: Built, reference: str, plans: Collection[str]) -> list[str]:
    """Return warnings about a rule that is of another file than before, and about plans that are gone."""
    other = [f"{folder} was built from {before.reference}, and is now of {reference}"]
    gone = [f"{folder} no longer has the plan {p}: there is none of that name" for p in before.plans if p not in plans]
    return gone + (other if before.reference != reference else [])


def _requested(request: Request, config: Config, manifest: Manifest) -> list[Pairing]:
    """Return the requested pairs; a named rule keeps the plans that it has."""
    project, known = request.project, load.plans(request.project)
    usual = wishes(project, config)
    if config.build is None and not request.names:
        usual += _built_before(manifest, project)
    if not request.named:
        return once(usual)
    out: list[Pairing] = []
    for name in request.names or dict.fromkeys(w.spec for w in usual):
        spec = load.find_spec(name, project)
        names = (spec.name, spec.loc.file, f"{spec.loc.file}:{spec.name}")
        before = manifest.plans(spec.name)
        new = [Pairing(name, w.plan, w.optional) for w in usual if w.spec in names]
        if request.plans or not (new or before):
            new = plan_wishes(name, request.plans or DEFAULT_PLANS, project)
        out += new + [Pairing(name, plan, False) for plan in before if plan in known]
    return once(out)


def _built_before(manifest: Manifest, project: Path) -> list[Pairing]:
    """Return the pairs that a folder has, but for those of specs and plans that are gone."""
    known = load.plans(project)
    found = {placed(built.reference, project): built.plans for built in manifest.specs.values()}
    return [Pairing(spec, p, False) for spec in found if _is_there(spec, project) for p in found[spec] if p in known]


def _is_there(spec: str, project: Path) -> bool:
    """Return True if there is a spec of that name, even a broken one.  E403 where its file no longer has one."""
    try:
        load.find_spec(spec, project)
    except UserError as error:
        file = project / "specs" / f"{spec}.py"
        if error.code == "E404" and file.is_file():
            remedy = "write @optimizer above the rule, or delete the file"
            raise UserError("E403", file=relative(str(file)), kind="spec", remedy=remedy) from None
        return error.code != "E404"
    return True


def _reference(asked: str, spec: Spec, project: Path) -> str:
    """Return the reference to a spec in the manifest: wrappers around a rule, the name of one in specs/, or file:name.

    Files are named by their path below the project.
    """
    file, root, source = Path(spec.loc.file), project.resolve(), targets.source_name(spec.loc.file)
    if "(" in asked:
        return asked
    if source.startswith("specs/") and spec.name in dict(load.declared(file)):
        return spec.name
    return f"{file.relative_to(root).as_posix() if file.is_relative_to(root) else source}:{spec.name}"


def _nothing_to_build(request: Request, config: Config) -> UserError:
    if request.plans and (request.names or load.entries(request.project)):
        note = f"no plan or spec matches --plan {' --plan '.join(request.plans)}"
    elif config.build is not None:
        note = "the `build` table of pyproject.toml names no spec that is here"
    else:
        idle = load.idle(request.project)
        return UserError("E414", note="; ".join(idle)) if idle else UserError("E414")
    return UserError("E414", note=note, hint="optgen list")


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


def _distinct(specs: Mapping[str, Built]) -> dict[str, str]:
    """Return class name -> spec, E412 for two of one name."""
    seen: dict[str, str] = {}
    for name, b in sorted(specs.items()):
        if (other := seen.setdefault(b.class_name, name)) != name:
            raise UserError("E412", what=f"the class {b.class_name}", note=f"they are {other} and {name}")
    return seen


# -- generating


def _jobs(units: Sequence[Unit], maths: Maths, backends: Sequence[str]) -> list[Job]:
    """Return the functions that generate the packages of plans and of rules. Plans have the text of all backends: rules
    share them, and may be built for others."""
    others = _left_out(backends)
    plans = {plan.name: plan for u in units for plan in u.plans}
    jobs: list[Job] = [partial(_inside, f"{PLANS}/{k}", partial(emit.plan_files, x, maths)) for k, x in plans.items()]
    return jobs + [partial(_inside, u.spec.name, partial(_rule, u, maths), others) for u in units]


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


def _left_out(backends: Sequence[str]) -> set[str]:
    """Return the names of files that a build with these backends has not; none are all."""
    others = [b for name, b in emit.BACKENDS.items() if backends and name not in backends]
    return {file for backend in others for file in backend.names}


def _rule(unit: Unit, maths: Maths) -> Files:
    """Return the files of a rule, of the stub of its class, and of what the lint finds about its plans."""
    files = emit.rule_files(unit.spec, tuple(plan.name for plan in unit.plans), maths) | emit.class_stub(unit.spec)
    for plan in unit.plans:
        files |= _inside(plan.name, partial(emit.findings_files, unit.spec, plan))
    return files


def _inside(folder: str, make: Job, left: Collection[str] = ()) -> Files:
    """Return the files that a job makes as those of a folder, without those of some names."""
    return {f"{folder}/{name}": text for name, text in make().items() if Path(name).name not in left}


def _generate(jobs: Sequence[Job], track: Track | None) -> Files:
    """Run the jobs in order: in two processes where a fork is safe and worth it, else in this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(PROCESSES, cores)
    alone = threading.active_count() == 1 and sys.platform == "linux"
    out: Files = {}
    with contextlib.ExitStack() as stack:
        done: Iterator[Files] = (job() for job in jobs)
        if len(jobs) >= MANY_JOBS and processes > 1 and alone:
            # A forked process has the jobs: they need not be sent, and could not be.
            pool = multiprocessing.get_context("fork").Pool(processes, _forked_jobs.extend, (jobs,))
            done = stack.enter_context(pool).imap(_run_job, range(len(jobs)))
        for files in track(done, len(jobs)) if track else done:
            out |= files
    return dict(sorted(out.items()))


_forked_jobs: list[Job] = []


def _run_job(number: int) -> Files:
    return _forked_jobs[number]()


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


def _compare(out: Path, files: Mapping[str, str], stale: Sequence[str], manifest: Manifest, outcome: Outcome) -> None:
    """Record the differences between the folder and the files."""
    diff: list[str] = []
    for name in sorted({*files, *stale}):
        old, new = _read(out / name), files.get(name)
        if old == new:
            outcome.unchanged += old is not None
            continue
        (outcome.written if new is not None else outcome.removed).append(name)
        if old and old.strip() and name != MANIFEST:
            outcome.edited += [name] * (digest(old.encode()) != manifest.files.get(name))
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
