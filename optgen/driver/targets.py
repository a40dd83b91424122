"""The cases of a pair of spec and plan, and the names of sources and functions in generated text."""

from __future__ import annotations

import hashlib
import itertools
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from optgen.base import ready
from optgen.base.loc import relative
from optgen.driver import load
from optgen.formats.plan import Plan, Storage
from optgen.ir.program import Step
from optgen.lang.spec import Spec
from optgen.lower import needs_matrix
from optgen.ops import dtypes
from optgen.ops.dtypes import DType

PARAM_DTYPES: tuple[DType, ...] = (dtypes.f32, dtypes.bf16, dtypes.f16)


@dataclass(frozen=True)
class Case:
    """A flag setting, a parameter dtype and a size class of a pair, with the storage under them.

    vector   True for tensors of fewer than two dimensions only, where formats differ for them
    """

    flags: Mapping[str, bool]
    param: DType
    small: bool
    storage: Storage
    vector: bool = False


def cases(spec: Spec, plan: Plan) -> Iterator[Case]:
    """Yield every case of (spec, plan): flag settings x parameter dtypes x size classes that differ."""
    for flags, param in itertools.product(spec.settings(), PARAM_DTYPES):
        present = spec.present(flags)
        recurrences = recurrences_of(spec, tuple(sorted(flags.items())))
        full = plan.storage(present, param, False, recurrences)
        yield Case(flags, param, False, full)
        if plan.small_numel and present:
            small = plan.storage(present, param, True, recurrences)
            if small.states != full.states:
                yield Case(flags, param, True, small)
        if full.matrix is not None and not needs_matrix(spec, flags):
            yield Case(flags, param, False, plan.storage(present, param, False, recurrences, vector=True), True)


@lru_cache(maxsize=4096)
def recurrences_of(spec: Spec, flags: tuple[tuple[str, bool], ...]) -> Mapping[str, object]:
    """Return the recurrence of each present state, at the steps that change it if there are any."""
    from optgen.lang.symbolic import recurrence

    return {s.name: recurrence(spec, spec.moving(dict(flags), s.name), s.name) for s in spec.present(dict(flags))}


def source_name(file: str) -> str:
    """Return the name of a source file in generated text, the same wherever it is built from.

    It is specs/... for ready-made specs, else the path below the folder with [tool.optgen] (or the nearest
    pyproject.toml), else specs/... in a folder of that name.
    """
    path = Path(file).resolve()
    made = ready.specs_dir().resolve()
    if path.is_relative_to(made):
        return f"specs/{path.relative_to(made).as_posix()}"
    root = load.table_above(path.parent) or next((p for p in path.parents if (p / "pyproject.toml").is_file()), None)
    if root is not None:
        return path.relative_to(root).as_posix()
    return f"specs/{path.name}" if path.parent.name == "specs" else path.name


def digest(file: str) -> str:
    """Return the first 12 hex digits of the file's sha256, line ends normalised."""
    try:
        text = Path(file).read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        text = "".join(linecache.getlines(file)).encode()  # a notebook's cell
    return hashlib.sha256(text).hexdigest()[:12]


def placed(spec: Spec, step: Step) -> Step:
    """Return the step with the spec's file renamed, in its stages' references to lines, as in generated text."""
    here = f"({relative(spec.loc.file)}:"
    if not any(here in s.why for s in step.stages):
        return step
    name = f"({source_name(spec.loc.file)}:"
    return replace(step, stages=tuple(replace(s, why=s.why.replace(here, name)) for s in step.stages))


def function_name(spec: Spec, flags: Mapping[str, bool], *words: str) -> str:
    """Return the words and the settings that differ from the default: adamw, adamw_amsgrad."""
    out = [spec.name, *words]
    for f in spec.flags:
        if flags[f.name] != f.default:
            out.append(f.name if flags[f.name] else f"no_{f.name}")
    return "_".join(out)


def case_name(spec: Spec, case: Case) -> str:
    """Return the name of a case: adamw_bfloat16, adamw_bfloat16_small, adamw_bfloat16_amsgrad."""
    name = function_name(spec, case.flags, case.param.torch)
    return name + ("_small" if case.small else "") + ("_vector" if case.vector else "")
