"""Files of a folder that are replaced together.

Everything is written beside the folder first, with copies of what it replaces, and moved from there.  What fails on the
way puts the old files back at once; a process that was killed while it moved leaves a list of what it was about, from
which the next one puts them back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

_LIST, _LOCK = "moving.json", "lock"
_YOUNG = 60.0
"""Seconds for which a folder is left alone where there are no locks."""


def replace_files(out: Path, files: Mapping[str, str], removed: Sequence[str], last: str) -> None:
    """Writes the texts to files of `out`, made where it is missing, and removes others; `last` is moved last.

    Raises OSError, with the folder as it was.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _room(out) as staging:
        new, old = staging / "new", staging / "old"
        for name, text in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_text(text, encoding="utf-8", newline="\n")
        names = [*sorted(files, key=lambda name: (name == last, name)), *removed]
        for name in names:
            if (out / name).is_file():
                (old / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(out / name, old / name)
        try:
            (staging / _LIST).write_text(json.dumps(names), encoding="utf-8")
            for name in names:
                if name in files:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new / name, out / name)
                else:
                    (out / name).unlink(missing_ok=True)
        except BaseException:
            _put_back(staging, out, names)
            raise


def recover(out: Path) -> None:
    """Puts back what processes that were killed while they moved files of `out` had replaced."""
    for staging in sorted(out.parent.glob(f"{_prefix(out)}*")):
        with contextlib.suppress(OSError), _ours(staging) as ours:
            if ours:
                names = _listed(staging)
                _put_back(staging, out, names)
                shutil.rmtree(staging, ignore_errors=True)


def _prefix(out: Path) -> str:
    return f".optgen-{out.name}-"


def _listed(staging: Path) -> Collection[str]:
    """What was being moved; nothing, where the list itself is cut short: it is whole before the first file moves."""
    try:
        names = json.loads((staging / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return names if isinstance(names, list) else []


def _put_back(staging: Path, out: Path, names: Collection[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            if (staging / "old" / name).is_file():
                os.rename(staging / "old" / name, out / name)
            elif not (staging / "new" / name).exists():  # it was moved, and there was none before
                (out / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _room(out: Path) -> Iterator[Path]:
    """A folder beside `out`, locked while this process lives, and gone afterwards."""
    staging = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    try:
        with _ours(staging):
            yield staging
            with contextlib.suppress(OSError):
                (staging / _LIST).unlink()  # all is in place: nothing to put back, whatever becomes of the rest
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _ours(staging: Path) -> Iterator[bool]:
    """Holds the lock of a folder; False where somebody who lives holds it, or may hold it where there are no locks."""
    old = time.time() - staging.stat().st_mtime > _YOUNG
    handle = os.open(staging / _LOCK, os.O_CREAT | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        yield _locked(handle, old)
    finally:
        os.close(handle)


def _locked(handle: int, otherwise: bool) -> bool:
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system, or a file system, without locks
        return otherwise
    return True


__all__ = ["recover", "replace_files"]
