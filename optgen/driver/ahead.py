"""Compile generated C++ kernels before their first step, for machines that train without a compiler."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from optgen.base.errors import UserError
from optgen.driver.eager_text import PLANS
from optgen.runtime.cpu import cpu, native
from optgen.runtime.layout import plans
from optgen.runtime.records.join import Pair

AT_ONCE = 8  # libraries per call, between two movements of the progress bar


def kernels_of(out: Path, packages: Iterable[str]) -> list[native.Job]:
    """Return a job for each kernel of the packages ("adamw/int8_split24"), for gradients of the parameter's dtype."""
    jobs, names = dict[native.Job, None](), list(packages)
    rules = dict.fromkeys(name.split("/")[0] for name in names)
    for name in (*names, *(f"{rule}/ascent/bf16_sr" for rule in rules if (out / rule / "ascent").is_dir())):
        pair = pair_of(out, *name.rsplit("/", 1))
        for variant in pair.variants:
            jobs[cpu.job(pair, variant, getattr(torch, variant.param))] = None
    return list(jobs)


def pair_of(out: Path, rule: str, plan: str) -> Pair:
    """Return a rule under a plan, read from their generated files: the folder need not be importable."""
    own = (out / rule if (out / rule / PLANS).is_dir() else out) / PLANS / plan
    record = _package(own) if own.is_dir() else importlib.import_module(f"optgen.{PLANS}.{plan}")
    kernels = _package(out / rule / plan) if (out / rule / plan).is_dir() else None
    return plans.joined(_package(out / rule), record, kernels, out / rule)


def _package(folder: Path) -> ModuleType:
    name = f"_ahead_{folder.parent.name}_{folder.name}"
    file = folder / "__init__.py"
    found = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    assert found is not None and found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)  # it may import packages in it
    found.loader.exec_module(module)
    return module


def compile_ahead(jobs: Sequence[native.Job], track: Callable[[Iterable[object], int], Iterable[object]]) -> int:
    """Compile the kernels and return their number. Raises E416 with the compiler's message."""

    def batches() -> Iterator[object]:
        for k in range(0, len(jobs), AT_ONCE):
            yield from native.load(jobs[k : k + AT_ONCE], quiet=True)

    for made in track(batches(), len(jobs)):
        if isinstance(made, native.Unavailable):
            raise UserError("E416", why=str(made))
    return len(jobs)
