"""Replace files of a folder together: all of them, or none.

New files and copies of the old ones are first written to a folder beside it. An error while files move puts the old
files back; a process that is killed then leaves a list of the files that it was moving, from which the next build puts
them back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

_LIST = "moving.json"
_WAIT = 60.0
"""Seconds after which a build is taken for dead where the file system has no locks."""


def staging_folder(out: Path) -> Path:
    """Return the folder beside `out` that holds files while they are replaced."""
    return out.parent / f".optgen-{out.name}"


def replace_files(out: Path, files: Mapping[str, str], removed: Sequence[str], last: str) -> None:
    """Write the texts to files of `out`, which is created if missing, and remove others; move `last` last.

    Raises OSError, with the folder as it was.
    """
    out.mkdir(parents=True, exist_ok=True)
    staging = staging_folder(out)
    with _locked(out) as alone:
        _put_back(staging, out, alone)
        try:
            staging.mkdir()
        except OSError as error:  # name the folder that the user knows
            raise OSError(error.errno, error.strerror, str(out)) from None
        try:
            for name, text in files.items():
                (staging / "new" / name).parent.mkdir(parents=True, exist_ok=True)
                (staging / "new" / name).write_text(text, encoding="utf-8", newline="\n")
            names = [*sorted(files, key=lambda name: (name == last, name)), *removed]
            is_new = {name: not (out / name).is_file() for name in names}
            for name in (x for x in names if not is_new[x]):
                (staging / "old" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(out / name, staging / "old" / name)
            (staging / _LIST).write_text(json.dumps(is_new), encoding="utf-8")
            for name in names:
                if name in files:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(staging / "new" / name, out / name)
                else:
                    (out / name).unlink(missing_ok=True)
            (staging / _LIST).unlink()  # everything is in place: nothing is put back from here on
        finally:
            _put_back(staging, out, True)


def recover(out: Path) -> None:
    """Put back the files of `out` that a killed build was replacing."""
    staging = staging_folder(out)
    if staging.is_dir():
        with _locked(out if out.is_dir() else out.parent) as alone:
            _put_back(staging, out, alone)


def _put_back(staging: Path, out: Path, alone: bool) -> None:
    """Restore the listed files from their copies, and remove the staging folder; may be interrupted and repeated.

    Without a list, or with one that was cut short, no file has moved yet. Unless `alone`, leave the folder of another
    build until it is old.
    """
    with contextlib.suppress(OSError):
        if not alone and time.time() - staging.stat().st_mtime < _WAIT:
            return
    listed: object = {}
    with contextlib.suppress(OSError, ValueError):
        listed = json.loads((staging / _LIST).read_text(encoding="utf-8"))
    for name, is_new in listed.items() if isinstance(listed, dict) else ():
        with contextlib.suppress(OSError):
            if not is_name(name) or not is_inside(out, name):
                continue
            if (staging / "old" / name).is_file():
                os.replace(staging / "old" / name, out / name)
            elif is_new and not (staging / "new" / name).exists():  # it was moved
                (out / name).unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)


def is_name(name: str) -> bool:
    """Return True if `name` is a plain path below a folder, as builds spell it.

    Manifests and lists of moved files can be edited by anyone, and the files that they name are removed.
    """
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and not PureWindowsPath(name).drive
    return plain and bool(path.parts) and path.as_posix() == name and not path.is_absolute() and ".." not in path.parts


def is_inside(out: Path, name: str) -> bool:
    """Return True if the file's folder is in `out` once links are followed."""
    return Path(os.path.realpath((out / name).parent)).is_relative_to(os.path.realpath(out))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock of the folder, which ends with the process; yield False where there are no locks."""
    alone = False
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        yield alone
