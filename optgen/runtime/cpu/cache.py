"""The folder of the user's in which generated text and compiled kernels are kept: $OPTGEN_CACHE, or ~/.cache/optgen.

What is kept is a folder under a name that says all that shaped it.  It appears whole or not at all, so any number of
processes may share the cache.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from optgen.runtime.records.warn import warn


def place() -> Path:
    """$OPTGEN_CACHE, else $XDG_CACHE_HOME/optgen, else ~/.cache/optgen; it may not exist."""
    asked = os.environ.get("OPTGEN_CACHE", "")
    if asked:
        return Path(asked).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "optgen"


def is_ours(status: os.stat_result) -> bool:
    """Return True if only the current user can write the file."""
    if sys.platform == "win32":
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _ours() -> Path | None:
    """Return the cache, made where it is missing; None, with one warning, where it is not ours alone: code is loaded
    from there."""
    found = place()
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours(found.stat()):
            return found
        _warn(f"{found} belongs to or can be written by other users (chmod go-w, or set OPTGEN_CACHE)")
    except OSError as error:
        _warn(f"{found} cannot be used ({error.strerror or error})")
    return None


def folder() -> Path:
    """Return the cache if it can be used and written to, else a folder of this process, with one warning."""
    found = _ours()
    if found is not None and os.access(found, os.W_OK):
        return found
    if found is not None:
        _warn(f"{found} takes no files")
    return _temporary()


@cache
def _warn(reason: str) -> None:
    warn(f"optgen compiles its kernels anew in every process: {reason}")


@cache
def _temporary() -> Path:
    fresh = Path(tempfile.mkdtemp(prefix="optgen-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    return fresh


def find(name: str, intact: Callable[[Path], bool]) -> Path | None:
    """Return the folder of a name if it is in the cache, which may be one that is only read."""
    found = _ours()
    return found / name if found is not None and intact(found / name) else None


def kept(name: str, make: Callable[[Path], object], intact: Callable[[Path], bool] = Path.is_dir) -> Path:
    """Return the folder of a name in the cache, which `make` fills where it is missing or not intact.

    Of processes that miss it at the same time one makes it.  Raises OSError if there is no room.
    """
    if found := find(name, intact):
        return found
    path = folder() / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone(path):
        if intact(path):
            return path
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))  # 0700
        try:
            make(new)
            shutil.rmtree(path, ignore_errors=True)  # damaged
            new.rename(path)
        except OSError:
            if not intact(path):  # of another process that was faster, where there are no locks
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return path


def write(files: Mapping[str, str], into: Path) -> None:
    """Write files (path -> text) into a folder."""
    for name, text in files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process make a file while the others wait for it.

    The lock ends with the process that holds it.  It saves work only: where it cannot be had, all go on.
    """
    lock = Path(f"{path}.lock")
    with ExitStack() as held:
        with suppress(ImportError, OSError):  # a folder or a system without locks
            import fcntl

            file = held.enter_context(open(lock, "w"))
            held.callback(lock.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
