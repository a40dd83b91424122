"""Compiles printed C++ kernels before their first step: for machines that train without a compiler at hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from optgen.base.errors import UserError
from optgen.runtime import cpu, native

AT_ONCE = 8  # libraries per call, between two movements of the progress bar


def kernels_of(out: Path, packages: Iterable[str]) -> list[native.Job]:
    """A job for each kernel of the printed packages ("adamw/int8_split24"), for gradients of the parameter's dtype."""
    jobs: dict[native.Job, None] = {}
    for name in packages:
        plan = _plan(out / name, name)
        for variant in plan.VARIANTS:
            jobs[cpu.job(plan, variant.kernel_name, getattr(torch, variant.param))] = None
    return list(jobs)


def _plan(folder: Path, name: str) -> ModuleType:
    """The tables of a printed plan, read from their file: the folder need not be importable."""
    found = importlib.util.spec_from_file_location(
        f"_ahead_{name.replace('/', '_')}", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def compile_ahead(jobs: Sequence[native.Job], track: Callable[[Iterable[object], int], Iterable[object]]) -> int:
    """How many libraries are in the cache folder now; E416 with the compiler's message where one cannot be had."""

    def batches() -> Iterator[object]:
        for k in range(0, len(jobs), AT_ONCE):
            yield from native.load(jobs[k : k + AT_ONCE], quiet=True)

    for made in track(batches(), len(jobs)):
        if isinstance(made, native.Unavailable):
            raise UserError("E416", why=str(made))
    return len(jobs)
