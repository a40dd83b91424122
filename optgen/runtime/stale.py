"""Say when a generated class is imported whose spec or plans file has changed since it was built."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from pathlib import Path

ACTIONS = ("warn", "error", "ignore")
"""The values of OPTGEN_STALE, the default first."""


@functools.cache
def check(folder: str, spec: str) -> None:
    """Warn, once, if the generated code of a spec is older than the project's files that it was generated from.

    folder  the generated package, whose manifest lists those files; one that is not there (in a wheel, or where the
            package was moved to) is passed over
    """
    action = os.environ.get("OPTGEN_STALE") or ACTIONS[0]
    if action not in ACTIONS:
        raise ValueError(f"OPTGEN_STALE must be one of {', '.join(ACTIONS)}, got {action!r}")
    if action == "ignore":
        return
    try:
        sources = dict(json.loads(Path(folder, "MANIFEST.json").read_bytes())["specs"][spec])
    except (OSError, ValueError, KeyError, TypeError):  # of an earlier version, or damaged: the next build says so
        return
    if not (found := [file for file, digest in sources.items() if _changed(folder, file, digest)]):
        return
    names = ", ".join(_shown(folder, file) for file in found)
    built_at = _shown(folder, spec)
    again = "build it again as it was built (`optgen build`, or `optgen build SPEC --out FOLDER`)"
    text = f"{names} changed since {built_at} was built from it; {again}, or set OPTGEN_STALE=ignore"
    if action == "error":
        raise ImportError(text)
    warnings.warn(text, stacklevel=3)


def _changed(folder: str, file: str, digest: str) -> bool:
    try:
        text = Path(folder, file).read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        return False
    return hashlib.sha256(text).hexdigest()[:12] != digest


def _shown(folder: str, file: str) -> str:
    return os.path.relpath(os.path.join(folder, file))
