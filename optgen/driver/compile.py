"""Compile in memory: a spec and a plan -> a class, without a generated folder in the user's project.

The text is the same as `optgen build` writes.  It is kept in a folder of the user's cache, named by its own
content, because Triton and tracebacks read sources from files; from there it is imported under a private package.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from optgen.base.errors import UserError, did_you_mean
from optgen.driver import emit, judge, load
from optgen.driver.project import MATHS, Maths
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.runtime.cpu import native
from optgen.runtime.layout import plans as runtime_plans
from optgen.runtime.records.join import Pair
from optgen.runtime.records.warn import tell

PACKAGE = "_optgen_compiled"
DEFAULT_PLAN = "int8_split24"

_specs: dict[str, tuple[Spec, Maths]] = {}  # module of a compiled class -> its spec and maths


def compile(
    spec: Spec | str | Path, plan: Plan | str = DEFAULT_PLAN, maths: Literal["strict", "fast"] = "fast"
) -> type[Any]:
    """Return the optimizer class of a spec under a plan.

    spec   a Spec, its name, its file ("specs/mine.py"), or file.py:name
    plan   a Plan, its name, or plans.py:name; other plans are compiled when a parameter group asks for them
    maths  "fast", or "strict": the same bits on every backend

    UserError (optgen.base.errors) with a code, the place and a hint for a spec or plan that is wrong or not there, and
    for a pair that the lint refuses.
    """
    if maths not in MATHS:
        raise UserError("E411", option="maths", want="strict or fast", got=maths, hint=did_you_mean(str(maths), MATHS))
    given: tuple[tuple[str, object, type], ...] = (("spec", spec, Spec), ("plan", plan, Plan))
    for option, value, kind in given:
        if not isinstance(value, (kind, str, Path)):
            hint = "put @optimizer(...) above the function" if isinstance(value, FunctionType) else ""
            want, got = f"a {kind.__name__}, its name or its file", getattr(value, "__name__", repr(value))
            raise UserError("E411", option=option, want=want, got=got, hint=hint)
    found = spec if isinstance(spec, Spec) else load.find_spec(spec)
    chosen = plan if isinstance(plan, Plan) else load.find_plan(plan)
    chosen.check_name()
    runtime_plans.provider = provide
    return _class(found, chosen, maths)


@lru_cache(maxsize=256)
def _class(spec: Spec, plan: Plan, maths: Literal["strict", "fast"]) -> type[Any]:
    spec.check()
    judge.judge(spec, plan)
    tell(f"generating {spec.class_name} under plan {plan.name}")
    files = emit.emit_package(spec, plan, maths=maths)
    module = import_package(spec.name, files)
    _specs[module.__name__] = spec, maths
    made = getattr(module, spec.class_name)
    assert isinstance(made, type)
    return made


def provide(cls: type, plan: str) -> Pair:
    """Return the records of a class under a plan that it was not built for."""
    base: Any = cls
    spec, maths = _specs.get(cls.__module__) or (load.find_spec(base.SPEC), "fast")
    if spec.class_name != cls.__name__:
        raise ValueError(f"{cls.__name__} was built from a spec {base.SPEC!r} that is not here; build it with the plan")
    try:
        made = _class(spec, load.find_plan(plan), maths)
    except UserError as error:
        raise ValueError(str(error)) from None  # what torch's callers expect of a wrong option
    return runtime_plans.load(made, plan)


def import_package(name: str, files: dict[str, str]) -> ModuleType:
    """Import the package of these files: path below it -> text."""
    key = "".join(f"{path}\0{len(text)}\0{text}" for path, text in sorted(files.items()))
    package = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    root = cache_folder()
    for path, text in files.items():
        _put(root / package / path, text)
    if PACKAGE not in sys.modules:
        parent = ModuleType(PACKAGE, "Optimizers compiled in memory.")
        parent.__path__ = []
        sys.modules[PACKAGE] = parent
    if str(root) not in sys.modules[PACKAGE].__path__:
        sys.modules[PACKAGE].__path__.append(str(root))
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{package}")


def _put(path: Path, text: str) -> None:
    """Write a file whose name has its content's hash, whole or not at all, unless it is there already."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Return the folder of compiled kernels if it can be used, else a new folder for this process.

    Code is imported from there: a folder that others own or may write to is not used.
    """
    folder = native.usable_folder()
    if folder is not None and os.access(folder, os.W_OK):
        return folder
    fresh = Path(tempfile.mkdtemp(prefix="optgen-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh
