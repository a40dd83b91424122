"""The ready-made optimizers as `optgen build` writes them, generated when they are first imported and kept in a cache.

    optgen._ready.adamw             the class of a rule, its records and its text for each backend
    optgen._ready.plans.fp32        a plan
    optgen._ready.adamw.bnb8        what the lint finds wrong with the two together, of plans that are discouraged

A module is kept under a hash of what it was generated from. One that is there needs no compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from optgen.base import ready
from optgen.runtime.cpu import cache

__path__: list[str] = []  # it is a package, all of whose modules Finder finds


class Finder:
    """Finds the modules of this package, among those of `sys.meta_path`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return how to load a rule, a plan or findings; None for all other modules."""
        if not name.startswith(f"{__name__}."):
            return None
        parts = name.split(".")[2:]
        match parts:
            case ["plans"]:
                return ModuleSpec(name, None, is_package=True)
            case [rule] if rule in ready.classes().values():
                pass
            case [_, plan] if plan in ready.plans():
                pass
            case _:
                return None
        found = folder(*parts)
        return importlib.util.spec_from_file_location(
            name, found / "__init__.py", submodule_search_locations=[str(found)]
        )


def folder(*parts: str) -> Path:
    """Return the folder of a rule ("adamw"), of a plan ("plans", "fp32") or of findings ("adamw", "bnb8")."""
    name = f"ready_{ready.key()}/{'/'.join(parts)}"
    return cache.kept(name, lambda into: cache.write(_generate(parts), into))


def _generate(parts: tuple[str, ...]) -> dict[str, str]:
    files: dict[str, str] = importlib.import_module("optgen.driver.compile").ready_files(*parts)
    return files


sys.meta_path.insert(0, Finder())
