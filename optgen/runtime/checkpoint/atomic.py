"""Files that replace others whole: written beside their place, synced and renamed.

Whoever is killed when, there is the old file or the new one.
"""

from __future__ import annotations

import os
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
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with made.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            why = f"there is no folder {str(path.parent)!r}; make it first"
            raise FileNotFoundError(error.errno, why, str(path)) from None
        if error.filename is not None and str(error.filename) not in (str(made), str(path)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            made.unlink()  # after an error
    if hasattr(os, "O_DIRECTORY"):  # the name is safe only when the folder is
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
