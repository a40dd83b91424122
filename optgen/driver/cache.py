"""The folder in which generated text is kept. Nothing here needs the compiler, which makes what is missing."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from optgen.runtime.cpu import native


def folder() -> Path:
    """Return the folder of compiled kernels if it can be used and written to, else one of this process.

    Code is imported from there: a folder that others own or may write to is not used.
    """
    usable = native.usable_folder()
    return usable if usable is not None and os.access(usable, os.W_OK) else _temporary()


@cache
def _temporary() -> Path:
    fresh = Path(tempfile.mkdtemp(prefix="optgen-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh


def kept(name: str, make: Callable[[], Mapping[str, str]]) -> Path:
    """Return the folder of a name in the cache, which is made of these files (path -> text) where it is missing.

    It is there whole or not at all, and of processes that miss it at the same time one makes it.
    """
    usable = native.usable_folder()
    if usable is not None and (usable / name).is_dir():  # in a folder that is only read, too
        return usable / name
    path = folder() / name
    try:
        _make(path, make)
    except OSError:  # no space
        _make(path := _temporary() / name, make)
    return path


def _make(path: Path, make: Callable[[], Mapping[str, str]]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with native.alone(path):
        if path.is_dir():
            return
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
        try:
            for name, text in make().items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_text(text, encoding="utf-8", newline="\n")
            new.rename(path)
        except OSError:
            if not path.is_dir():  # of another process that was faster, where there are no locks
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
