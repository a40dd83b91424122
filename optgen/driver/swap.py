"""Files of a folder that are replaced together.

Everything is written beside the folder first, with copies of what it replaces, and moved from there.  What fails on the
way puts the old files back at once; a process that was killed while it moved leaves a list of what it was about, from
which the next one puts them back.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

_LIST, _LOCK = "moving.json", "lock"
_YOUNG = 60.0
"""Seconds for which a folder is left alone where there are no locks, or where nothing has moved yet."""


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
        fresh = {name: not (out / name).is_file() for name in names}
        for name in names:
            if not fresh[name]:
                (old / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(out / name, old / name)
        try:
            (staging / _LIST).write_text(json.dumps({"folder": out.name, "files": fresh}), encoding="utf-8")
            for name in names:
                if name in files:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new / name, out / name)
                else:
                    (out / name).unlink(missing_ok=True)
        except BaseException:
            _put_back(staging, out, fresh)
            raise


def is_name(name: str) -> bool:
    """Whether it says a file below a folder, spelled as builds spell it: lists of names are files that anyone may
    edit, and what they name is removed.
    """
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and not PureWindowsPath(name).drive
    return plain and bool(path.parts) and path.as_posix() == name and not path.is_absolute() and ".." not in path.parts


def is_inside(out: Path, name: str) -> bool:
    """Whether its folder lies in `out`, once links are followed."""
    return Path(os.path.realpath((out / name).parent)).is_relative_to(os.path.realpath(out))


def recover(out: Path) -> None:
    """Puts back what processes that were killed while they moved files of `out` had replaced."""
    for staging in sorted(out.parent.glob(f"{glob.escape(_prefix(out))}*")):
        with contextlib.suppress(OSError):
            if not (staging / _LIST).exists() and time.time() - staging.stat().st_mtime < _YOUNG:
                continue  # nothing has moved, and who made it may be about to lock it
        with contextlib.suppress(OSError), _ours(staging) as ours:
            if ours and (fresh := _listed(staging, out)) is not None:
                _put_back(staging, out, fresh)
                shutil.rmtree(staging, ignore_errors=True)


def _prefix(out: Path) -> str:
    return f".optgen-{out.name}-"


def _listed(staging: Path, out: Path) -> Mapping[str, bool] | None:
    """What was being moved, and whether there was no such file; nothing, where the list itself is cut short: it is
    whole before the first file moves.

    None where it is of another folder, whose name begins as that of `out`.
    """
    try:
        found = json.loads((staging / _LIST).read_text(encoding="utf-8"))
        fresh: dict[str, bool] = found["files"]
        ours = {name: none for name, none in fresh.items() if is_name(name) and is_inside(out, name)}
        return ours if found["folder"] == out.name else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _put_back(staging: Path, out: Path, fresh: Mapping[str, bool]) -> None:
    """Done again, it changes nothing: it may be cut short as well."""
    for name, was_none in fresh.items():
        with contextlib.suppress(OSError):
            if (staging / "old" / name).is_file():
                os.replace(staging / "old" / name, out / name)
            elif was_none and not (staging / "new" / name).exists():  # it was moved
                (out / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _room(out: Path) -> Iterator[Path]:
    """A folder beside `out`, locked while this process lives, and gone afterwards."""
    try:
        staging = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
    except OSError as error:  # it names the folder that it could not make
        raise OSError(error.errno, error.strerror, str(out)) from None
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


__all__ = ["is_inside", "is_name", "recover", "replace_files"]
