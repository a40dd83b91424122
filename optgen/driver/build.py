"""`optgen build`: specs x plans -> the generated package, all of it or nothing.

All text is generated before anything is written. `swap` replaces the files, and a build that fails leaves the old ones.
MANIFEST.json holds the hash of every file, so that one edited by hand is never overwritten (without --force), and one
that is no longer built is removed. The same sources give the same bytes: no dates, hosts, absolute paths or hash order.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from optgen.base import ready
from optgen.base.errors import UserError
from optgen.base.loc import relative
from optgen.driver import emit, judge, load, swap, targets
from optgen.driver.eager_text import PLANS, is_ready
from optgen.driver.project import DEFAULT_PLANS, Config, Maths, Wish, plan_wishes, read_config, wishes
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec

MANIFEST = "MANIFEST.json"
INIT = "__init__.py"
STUB = "../optgen/optim/__init__.pyi"
"""The types of the ready-made classes, from their generated folder: it belongs to the build of this repository."""
READY = "../optgen/plans/"
"""The packages of the ready-made plans, likewise."""
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
    force: bool = False
    project: Path = field(default_factory=load.home)

    def __post_init__(self) -> None:
        if self.out == "":
            raise UserError("E411", option="--out", want="the name of a folder", got="", hint="--out generated")

    @property
    def partial(self) -> bool:
        """Return True if specs or plans are named: the others stay as they are, except plans of a spec that changed."""
        return bool(self.names or self.plans)


@dataclass
class Outcome:
    """The changes that a build made, or with `check` would make."""

    out: str
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0
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
    """A spec in the manifest: its class, the name or path that it is found by, its plans."""

    class_name: str
    reference: str
    plans: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of a generated folder.

    sources  a part ("adamw", "adamw/fp32") -> the project's files that it was generated from, by their path from the
             folder, with their hashes; the runtime compares them as a class is imported
    """

    files: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, Built] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def text(self) -> str:
        specs = {k: {"class": b.class_name, "spec": b.reference, "plans": list(b.plans)} for k, b in self.specs.items()}
        parts = {"files": self.files, "specs": specs, "sources": self.sources}
        return json.dumps({name: dict(sorted(part.items())) for name, part in parts.items()}, indent=2) + "\n"


def read_manifest(out: Path, force: bool = False) -> Manifest:
    """Return the folder's manifest; an empty one where there is none or, under `force`, where it cannot be read.

    Files that it lists may be removed later: a name that leads out of the folder is an error, and left out under
    `force`.
    """
    try:
        data = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        specs = {k: Built(v["class"], v["spec"], tuple(v["plans"])) for k, v in data["specs"].items()}
        files = {k: str(v) for k, v in data["files"].items()}
        sources = {k: dict(v) for k, v in data.get("sources", {}).items()}
    except (FileNotFoundError, NotADirectoryError):
        return Manifest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if force:
            return Manifest()
        why = str(error) if isinstance(error, OSError | ValueError) else "it is not one that optgen wrote"
        raise UserError("E415", file=relative(str(out / MANIFEST)), why=why) from error
    foreign = [name for name in files if not swap.is_name(name)]
    if foreign and not force:
        why = f"it lists {foreign[0]!r}, which is not how optgen names a file of this folder"
        raise UserError("E415", file=relative(str(out / MANIFEST)), why=why)
    return Manifest({k: v for k, v in files.items() if k not in foreign}, specs, sources)


def digest(data: bytes) -> str:
    """Return the content hash of a file, line ends normalised (git may change them)."""
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()[:32]


# -- units


@dataclass(frozen=True)
class Unit:
    """A spec, the plans to generate now, and all those that its class will list."""

    spec: Spec
    plans: tuple[Plan, ...]
    listed: tuple[str, ...]
    own: Mapping[str, str]  # the user's plans among them: plan -> its package
    reference: str


_LEFT = (
    "{spec}/{plan} was generated from another text of {spec} and is left as it is: no plan of that name is here; "
    "--plan FILE.py:{plan} generates it"
)
_LINKED = "{file} is no longer built, but not removed: its folder is a link to a place outside"


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend the collection of cycles, which took a seventh of the time: nodes live until the end anyway."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@_uncollected()
def build(request: Request, track: Track | None = None) -> Outcome:
    """Build or check the requested pairs. Raises UserError before anything is changed."""
    project = request.project
    config = read_config(project)
    out = Path.cwd() / request.out if request.out is not None else project / config.out
    try:
        if out.exists() and not out.is_dir():
            raise _not_written(relative(str(out)), "it is not a folder")
    except OSError as error:  # a name that is too long
        raise _not_written(request.out or config.out, error.strerror or str(error)) from error
    manifest = read_manifest(out, request.force)
    outcome = Outcome(relative(str(out)))
    outcome.warnings += load.idle(project)
    maths = request.maths or config.maths
    units = _units(request, config, manifest, out, outcome)
    backends = request.backends or config.backends or tuple(emit.BACKENDS)
    here = ready.is_checkout() and out.resolve() == ready.generated_dir()
    whole = here and not request.partial
    stays = manifest.files if request.partial else ()
    files = _generate(_jobs(units, maths, backends, here, whole, project, stays), track)
    beside = {name: files.pop(name) for name in list(files) if _is_beside(name)}
    specs = dict(manifest.specs) if request.partial else {}
    specs |= {u.spec.name: Built(u.spec.class_name, u.reference, u.listed) for u in units}
    _distinct(specs)
    files[INIT] = init_text({b.class_name: name for name, b in specs.items()})
    gone = sorted(x for x in set(manifest.files) - set(files) if not request.partial or _is_replaced(x, units, files))
    kept = {k: v for k, v in manifest.files.items() if k not in gone}
    stale = [name for name in gone if swap.is_inside(out, name)]
    outcome.warnings += [_LINKED.format(file=f"{outcome.out}/{name}") for name in gone if name not in stale]
    sources = dict(manifest.sources) if request.partial else {}
    for u in units:
        sources[u.spec.name] = _own([u.spec.loc.file], out, project)
        for plan in u.plans:
            sources[f"{u.spec.name}/{plan.name}"] = _own([u.spec.loc.file, plan.loc.file], out, project)
    new = Manifest(kept | {k: digest(v.encode()) for k, v in files.items()}, specs, sources)
    files[MANIFEST] = new.text()
    files |= beside
    outcome.packages = [f"{u.spec.name}/{p.name}" for u in units for p in u.plans]
    outcome.classes = sorted(u.spec.class_name for u in units)
    _compare(out, files, stale, outcome)
    if request.check:
        return outcome
    if not request.force:
        _refuse_edited(out, files, stale, manifest)
    _write(out, files, outcome)
    return outcome


def _is_replaced(name: str, units: Sequence[Unit], files: Files) -> bool:
    """Return True if a file of the folder is of a rule, a plan, or a rule and a plan, that are built anew."""
    rule, *inner = name.split("/")
    if rule == PLANS:
        return f"{PLANS}/{inner[0]}/{INIT}" in files
    built = {u.spec.name: {"ascent", *(p.name for p in u.plans)} for u in units}
    return rule in built and (len(inner) == 1 or inner[0] in built[rule])


def _units(request: Request, config: Config, manifest: Manifest, out: Path, outcome: Outcome) -> list[Unit]:
    """Return the units of a build in the order of their names."""
    project, maths = request.project, request.maths or config.maths
    built = {name: (b.reference, b.plans) for name, b in manifest.specs.items()}
    everything = wishes(project, config, built)
    asked = everything if not request.names else _named(request, everything, manifest)
    if request.plans and not request.names:
        names = dict.fromkeys(w.spec for w in everything)
        asked = [w for name in names for w in plan_wishes(name, request.plans, project)]
    if not asked:
        raise _nothing(request, config)
    order = list(load.plans(project))
    found: dict[str, tuple[Spec, dict[str, Plan]]] = {}
    for wish in asked:
        spec = load.find_spec(wish.spec, project)
        plan = load.find_plan(wish.plan, project)
        first, plans = found.setdefault(spec.name, (spec, {}))
        if first.loc.file != spec.loc.file:
            raise load.named_twice(spec.name, (first.loc, spec.loc))
        if _accepted(spec, plan, wish, request.force, outcome):
            plans[plan.name] = plan
    units = []
    for name, (spec, plans) in sorted(found.items()):
        if not plans:
            continue
        before = manifest.specs[name].plans if request.partial and name in manifest.specs else ()
        if before:
            _refuse_other(spec, project / manifest.specs[name].reference)
        kept = {p for p in before if f"{PLANS}/{p}/{INIT}" in manifest.files}  # the user's plans then
        for other in _left_behind(spec, before, kept, plans, out, maths):
            try:
                plan = load.find_plan(other, project)
            except UserError as error:
                if error.code != "E404":
                    raise
                outcome.warnings.append(_LEFT.format(spec=name, plan=other))
                continue
            if _accepted(spec, plan, Wish(name, other, False), request.force, outcome):
                plans[plan.name] = plan
        everywhere = {*plans, *before}
        listed = [p for p in order if p in everywhere] + sorted(everywhere - set(order))
        own = _packages(p for p in listed if (not emit.comes_with(plans[p], maths) if p in plans else p in kept))
        units.append(Unit(spec, tuple(plans[p] for p in listed if p in plans), tuple(listed), own, _reference(spec)))
    return units


def _refuse_other(spec: Spec, file: Path) -> None:
    """E412 where the generated optimizer of that name was built from another file that still declares it."""
    if file.is_file() and file.resolve() != Path(spec.loc.file).resolve():
        places = [place for name, place in load.declared(file) if name == spec.name]
        if places:
            raise load.named_twice(spec.name, (*places, spec.loc))


def _packages(plans: Iterable[str]) -> dict[str, str]:
    """Return the packages of a user's plans, as a class beside their folder names them."""
    return {plan: f"..{PLANS}.{plan}" for plan in plans}


def _left_behind(
    spec: Spec, before: tuple[str, ...], own: Collection[str], plans: Collection[str], out: Path, maths: Maths
) -> list[str]:
    """Return the existing plans of a class that were not requested, if the text of the class has changed since.

    A class is one rule: a plan of the old rule would train by that, under the formula of the new one.
    """
    others = [plan for plan in before if plan not in plans]
    packages = _packages(p for p in before if p in own)
    same = not others or _read(out / spec.name / INIT) == emit.emit_class(spec, before, packages, maths)
    return [] if same else others


def _nothing(request: Request, config: Config) -> UserError:
    if request.plans and (request.names or load.entries(request.project)):
        note = f"no plan or spec matches --plan {' --plan '.join(request.plans)}"
    elif config.build is not None:
        note = "the `build` table of pyproject.toml names no spec that is here"
    else:
        idle = load.idle(request.project)
        return UserError("E414", note="; ".join(idle)) if idle else UserError("E414")
    return UserError("E414", note=note, hint="optgen list")


def _named(request: Request, everything: Sequence[Wish], manifest: Manifest) -> list[Wish]:
    """Return the named specs under the named plans, else under those that they have, else under the default plans."""
    out: list[Wish] = []
    known = load.entries(request.project)
    for name in request.names:
        spec = load.find_spec(name, request.project).name
        usual = [w for w in everything if _stands_for(w, spec, known, request.project)]
        if request.plans:
            out += plan_wishes(name, request.plans, request.project)
        elif usual:
            out += [Wish(name, w.plan, w.optional) for w in usual]
        else:
            plans = manifest.specs[spec].plans if spec in manifest.specs else DEFAULT_PLANS
            out += [Wish(name, plan, False) for plan in plans]
    return out


def _stands_for(wish: Wish, spec: str, known: Collection[str], project: Path) -> bool:
    """Return True if a wish is for the spec of that name; another one may be broken."""
    if wish.spec in known:
        return wish.spec == spec
    try:
        return load.find_spec(wish.spec, project).name == spec
    except UserError:
        return False


def _accepted(spec: Spec, plan: Plan, wish: Wish, force: bool, outcome: Outcome) -> bool:
    """Return True if a pair is built. Leaves out a pair of a pattern that does not fit; raises UserError for others."""
    spec.check()
    try:
        verdict = judge.judge(spec, plan, force=force)
    except UserError as error:
        if not wish.optional or not error.code.startswith("E3"):
            raise
        outcome.skipped.append(f"{spec.name} under {plan.name}: {error.message}")
        return False
    if force and not plan.discouraged:
        errors = [f for f in verdict.findings if f.severity == "error"]
        outcome.warnings += [f"{spec.name} under {plan.name}, built with --force: {f}" for f in errors]
    return True


def _own(files: Iterable[str], out: Path, project: Path) -> dict[str, str]:
    """Return the hashes of those files that are the project's own, by their path from the generated folder."""
    root, folder, made = project.resolve(), out.resolve(), ready.specs_dir().resolve()
    found = [Path(file).resolve() for file in files]
    # A folder elsewhere has no path to the project that holds on another machine.
    own = [file for file in found if folder.is_relative_to(root) and file.is_relative_to(root)]
    if made != root / "specs":
        own = [file for file in own if not file.is_relative_to(made)]
    return {Path(os.path.relpath(file, folder)).as_posix(): targets.digest(str(file)) for file in own}


def _reference(spec: Spec) -> str:
    """Return the reference to a spec in the manifest: its path below its project, or the name of a ready-made one."""
    file = Path(spec.loc.file).resolve()
    own = load.table_above(file.parent)
    if own is None and file.is_relative_to(ready.specs_dir().resolve()):
        return spec.name
    return targets.source_name(spec.loc.file)


def _distinct(specs: Mapping[str, Built]) -> None:
    seen: dict[str, str] = {}
    for name, b in sorted(specs.items()):
        if (other := seen.setdefault(b.class_name, name)) != name:
            raise UserError("E412", what=f"the class {b.class_name}", note=f"they are {other} and {name}")


# -- generating


def _jobs(
    units: Sequence[Unit],
    maths: Maths,
    backends: tuple[str, ...],
    here: bool,
    whole: bool,
    project: Path,
    kept: Collection[str] = (),
) -> list[Job]:
    """Return the functions that generate the text of classes, of pairs, and of the packages of plans.

    here    this repository's folder is built: optgen.optim's stub has its ready-made classes
    whole   all of it is: include the files beside it
    kept    files that stay: those of a backend that is not asked for are generated again, lest versions mix
    """
    others = {file for name, backend in emit.BACKENDS.items() if name not in backends for file in backend.names}
    jobs: list[Job] = []

    def add(folder: str, make: Job, left: Collection[str] = others) -> None:
        def job() -> Files:
            made = {f"{folder}/{file}": text for file, text in make().items()}
            return {name: text for name, text in made.items() if Path(name).name not in left or name in kept}

        jobs.append(job)

    used = {plan.name: plan for u in units for plan in u.plans if not emit.comes_with(plan, maths)}
    for plan in used.values():
        add(f"{PLANS}/{plan.name}", partial(emit.plan_files, plan, maths))
    for u in units:
        add(u.spec.name, partial(emit.rule_files, u.spec, u.listed, u.own, maths))
        if not (here and is_ready(u.spec)):
            add(u.spec.name, partial(emit.class_stub, u.spec))
        for plan in u.plans:
            add(f"{u.spec.name}/{plan.name}", partial(emit.emit_plan, u.spec, plan, maths=maths))
    if whole:
        specs = [u.spec for u in units]
        jobs.insert(0, lambda: {f"{READY}discouraged.py": emit.findings_text(specs)})  # it takes longest
        ready = [plan for plan in load.plans(project).values() if is_ready(plan)]
        for k, plan in enumerate(ready):
            add(f"{READY}{plan.name}", partial(emit.plan_files, plan, "fast", tuple(ready[:k])), ())
        jobs.append(lambda: {STUB: emit.emit_stub(specs)})
    return jobs


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
            pool = multiprocessing.get_context("fork").Pool(processes, _taken.extend, (jobs,))
            done = stack.enter_context(pool).imap(_do, range(len(jobs)))
        for files in track(done, len(jobs)) if track else done:
            out |= files
    return dict(sorted(out.items()))


_taken: list[Job] = []


def _do(number: int) -> Files:
    return _taken[number]()


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


def _compare(out: Path, files: Mapping[str, str], stale: Sequence[str], outcome: Outcome) -> None:
    """Record the differences between the folder and the files."""
    diff: list[str] = []
    for name in sorted({*files, *stale}):
        old, new = _read(out / name), files.get(name)
        if old == new:
            outcome.unchanged += old is not None
            continue
        (outcome.written if new is not None else outcome.removed).append(name)
        a, b = f"{outcome.out}/{name}", f"{outcome.out}/{name} (built)"
        lines = difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), a, b)
        diff += [line if line.endswith("\n") else line + "\n" for line in lines]
    outcome.diff = "".join(diff)


def _refuse_edited(out: Path, files: Mapping[str, str], stale: Sequence[str], manifest: Manifest) -> None:
    """Raise E406 if a file that would change differs from the one that an earlier build wrote."""
    edited = []
    for name in sorted(x for x in {*files, *stale} if x != MANIFEST and not _is_beside(x)):
        old = _read(out / name)
        if old and old.strip() and old != files.get(name) and digest(old.encode()) != manifest.files.get(name):
            edited.append(name)
    if edited:
        more = f" and {len(edited) - 3} more" if len(edited) > 3 else ""
        raise UserError("E406", out=relative(str(out)), names=", ".join(edited[:3]) + more)


def _is_beside(name: str) -> bool:
    """Return True for files of this package, which a build of this repository writes beside its generated folder."""
    return name == STUB or name.startswith(READY)


def _write(out: Path, files: Mapping[str, str], outcome: Outcome) -> None:
    """Write the files that differ, all or none, the manifest last."""
    if outcome.clean:
        return
    try:
        written = {name: files[name] for name in outcome.written}
        beside = {name: written.pop(name) for name in outcome.written if _is_beside(name)}
        swap.replace_files(out, written, outcome.removed, MANIFEST)
        for name, text in beside.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text, encoding="utf-8", newline="\n")
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
