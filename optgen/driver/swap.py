"""Replace files of a folder together: an error puts the old ones back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def replace_files(out: Path, files: Mapping[str, str], removed: Sequence[str], last: str) -> None:
    """Write the texts to files of `out`, which is created if missing, and remove others; move `last` last.

    New files and copies of the old ones are first written to a folder beside it. Raises OSError, with the folder as
    it was. The files that a killed process has moved are those of its build: a build of the same sources goes on.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        folder = tempfile.mkdtemp(prefix=f".optgen-{out.name}-", dir=out.parent)
    except OSError as error:  # name the folder that the user knows
        raise OSError(error.errno, error.strerror, str(out)) from None
    new, old = Path(folder, "new"), Path(folder, "old")
    moved: list[str] = []
    try:
        for name, text in files.items():
            _place(new, name).write_text(text, encoding="utf-8", newline="\n")
        names = [*sorted(files, key=lambda name: (name == last, name)), *removed]
        for name in names:
            if (out / name).is_file():
                shutil.copy2(out / name, _place(old, name))
        for name in names:
            moved.append(name)
            if name in files:
                os.replace(new / name, _place(out, name))
            else:
                (out / name).unlink(missing_ok=True)
    except BaseException:
        for name in moved:
            if (old / name).is_file():
                os.replace(old / name, out / name)
            elif not (new / name).exists():
                (out / name).unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(folder: Path, name: str) -> Path:
    """Return the path of a file, whose folder is made."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return folder / name
