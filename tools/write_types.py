"""Write optgen/optim/__init__.pyi, the types of the ready-made optimizers, from their specs.

    python tools/write_types.py     in a checkout, whose copy git ignores (`make setup` runs it)

As a step of the wheel's build it adds them to the wheel.  SymPy and Jinja are all that it needs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "optgen" / "optim" / "__init__.pyi"

with suppress(ModuleNotFoundError):
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CustomBuildHook(BuildHookInterface[Any]):
        """The step, under the name that hatchling looks for."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Write the file and add it to the wheel."""
            write()
            build_data["force_include"][str(FILE)] = FILE.relative_to(ROOT).as_posix()


def write() -> None:
    """Write the file, whole or not at all, if its text changes."""
    sys.path.insert(0, str(ROOT))
    try:
        from optgen.base import ready
        from optgen.driver import emit, load
    finally:
        sys.path.remove(str(ROOT))

    text = emit.emit_stub(load.find_spec(ready.specs_dir() / f"{rule}.py") for rule in ready.classes().values())
    if not FILE.is_file() or FILE.read_text(encoding="utf-8") != text:
        new = FILE.with_name(f".{FILE.name}.{os.getpid()}")
        new.write_text(text, encoding="utf-8", newline="\n")
        new.replace(FILE)


if __name__ == "__main__":
    write()
