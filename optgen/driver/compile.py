"""Compile without a generated folder in the user's project: a spec and a plan -> a class.

The text is the same as `optgen build` writes.  It is kept in the user's cache, because Triton and tracebacks read
sources from files, and imported from there: under a hash of itself, or of a ready-made optimizer under a hash of the
compiler (optgen/_ready.py).
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

from optgen.base import ready
from optgen.base.errors import UserError, did_you_mean
from optgen.driver import emit, judge, load
from optgen.driver.plan_formats import PLANS
from optgen.driver.project import MATHS, Maths
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.runtime.cpu import cache
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
    module = importlib.import_module(f"{import_package(spec.name, files).__name__}.{spec.name}")
    _specs[module.__name__] = spec, maths
    made = getattr(module, spec.class_name)
    assert isinstance(made, type)
    return made


def provide(cls: type, plan: str) -> Pair:
    """Return the records of a class under a plan that it was not built for."""
    base: Any = cls
    own = cls.__module__.startswith("optgen._ready.")  # and not a rule of that name in the user's project
    rule = ready.specs_dir() / f"{base.SPEC}.py" if own else base.SPEC
    spec, maths = _specs.get(cls.__module__) or (load.find_spec(rule), "fast")
    if spec.class_name != cls.__name__:
        raise ValueError(f"{cls.__name__} was built from a spec {base.SPEC!r} that is not here; build it with the plan")
    try:
        made = _class(spec, load.find_plan(plan), maths)
    except UserError as error:
        raise ValueError(str(error)) from None  # what torch's callers expect of a wrong option
    return runtime_plans.load(made, plan)


def ready_files(first: str, second: str = "") -> dict[str, str]:
    """Return the files of a ready-made rule ("adamw"), of a plan ("plans", "fp32") or of findings ("adamw", "bf16")."""
    plan = load.find_plan(f"{ready.specs_dir() / load.PLANS_FILE}:{second}") if second else None
    if plan is not None and first == PLANS:
        tell(f"generating plan {second}")
        return emit.plan_files(plan)
    spec = load.find_spec(ready.specs_dir() / f"{first}.py")
    if plan is not None:
        return emit.findings_files(spec, plan)
    tell(f"generating {spec.class_name}")
    return emit.rule_files(spec, ready.plans(), "fast")


def import_package(name: str, files: dict[str, str]) -> ModuleType:
    """Import the package of these files (path below it -> text), which is kept under a hash of them."""
    key = "".join(f"{path}\0{len(text)}\0{text}" for path, text in sorted(files.items()))
    kept = f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = cache.kept(kept, lambda into: cache.write(files, into))
    if PACKAGE not in sys.modules:
        parent = ModuleType(PACKAGE, "Optimizers compiled in memory.")
        parent.__path__ = []
        sys.modules[PACKAGE] = parent
    if str(folder.parent) not in sys.modules[PACKAGE].__path__:
        sys.modules[PACKAGE].__path__.append(str(folder.parent))
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{folder.name}")
