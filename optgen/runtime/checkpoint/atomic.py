"""Files that replace others whole: written beside their place, synced and renamed.

Whoever is killed when, there is the old file or the new one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def instead_of(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` when the block ends without an error, and is deleted otherwise.

    An OSError names `path`, not the new file, whose name nobody knows.
    """
    _sweep(path)
    made = path
    try:
        made, descriptor = _begin(path)
        try:
            held = os.dup(descriptor) if os.name == "posix" else None  # the lock ends with the last of its descriptors
            try:
                with os.fdopen(descriptor, "w+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, path)
            finally:
                if held is not None:
                    os.close(held)
        except BaseException:
            with suppress(OSError):
                made.unlink()
            raise
    except OSError as error:
        if made == path and isinstance(error, FileNotFoundError):
            why = f"there is no folder {str(path.parent)!r}; make it first"
            raise FileNotFoundError(error.errno, why, str(path)) from None
        if error.filename is not None and str(error.filename) not in (str(made), str(path)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    if hasattr(os, "O_DIRECTORY"):  # the name is safe only when the folder is
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _begin(path: Path) -> tuple[Path, int]:
    """Create a file beside `path`, locked where the file system has locks, so that `_sweep` leaves it alone."""
    while True:
        made = path.with_name(f".{path.name}.{_machine()}{secrets.token_hex(4)}.tmp")
        descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if _lock(descriptor) is not False and made.exists():
            return made, descriptor
        os.close(descriptor)  # another save swept it before it was locked


def _sweep(path: Path) -> None:
    """Delete the files that killed writers to `path` left on this machine: those that nobody has locked.

    Process numbers would not tell: they are used again, and containers count their own.
    """
    left = re.compile(rf"\.{re.escape(path.name)}\.{_machine()}[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            if left.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDWR)
                    try:
                        if _lock(descriptor):
                            os.unlink(entry.path)
                    finally:
                        os.close(descriptor)


def _machine() -> str:
    """Return a hash of this machine's name: locks on a shared file system may be known to one machine alone."""
    return hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()


def _lock(descriptor: int) -> bool | None:
    """Lock a file until it is closed. Returns False if another process has locked it, None if there are no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True
