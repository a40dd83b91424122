"""A step of the wheel's build: it puts the C++ texts of all rules into one file, and those of all plans into another.

A kernel's source is joined from texts (optgen/runtime/cpu/cpu.py), which need no files of their own.  Of 81 small files
a wheel keeps names, checksums and repeated lines: 58 KB of 1.04 MB.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HEADERS = {"generated/*/kernels.h": "optgen/_generated", "optgen/plans/*/codecs.h": "optgen/plans"}
"""Files -> the folder of the one file that a wheel has of them."""


class CustomBuildHook(BuildHookInterface[Any]):
    """The step, under the name that hatchling looks for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files into a folder of their own and add them to the wheel."""
        self.folder = Path(tempfile.mkdtemp())
        for pattern, there in HEADERS.items():
            files = sorted(Path(self.root).glob(pattern))
            together = self.folder / files[0].name
            together.write_text("".join(f"// == {x.parent.name}\n{x.read_text()}" for x in files), encoding="utf-8")
            build_data["force_include"][str(together)] = f"{there}/{together.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder)
