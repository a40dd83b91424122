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
    sources = {} if action == "ignore" else _sources(folder)
    parts = {k: v for k, v in sources.items() if k == spec or k.startswith(f"{spec}/")}
    found = [(part, file) for part, files in parts.items() for file in files if _changed(folder, file, files[file])]
    if not found:
        return
    stale = {part for part, _ in found}
    elsewhere = [_shown(folder, file) for file in parts.get(spec, ()) if Path(file).parent.name != "specs"]
    name = f"{elsewhere[0]}:{spec}" if elsewhere else spec
    plans = [] if spec in stale or len(stale) == len(parts) - 1 else sorted(p.partition("/")[2] for p in stale)
    command = " ".join(["optgen build", name, *(f"--plan {plan}" for plan in plans)])
    names = ", ".join(_shown(folder, file) for file in dict.fromkeys(file for _, file in found))
    built = _shown(folder, spec)
    text = f"{names} changed since {built} was built from it; run `{command}` (or set OPTGEN_STALE=ignore)"
    if action == "error":
        raise ImportError(text)
    warnings.warn(text, stacklevel=3)


def _sources(folder: str) -> dict[str, dict[str, str]]:
    """Return the parts of a package ("adamw", "adamw/fp32"), each with its files and their hashes."""
    try:
        found: dict[str, dict[str, str]] = json.loads(Path(folder, "MANIFEST.json").read_bytes())["sources"]
    except (OSError, ValueError, KeyError, TypeError):  # of an earlier version, or damaged: the next build says so
        return {}
    return found


def _changed(folder: str, file: str, digest: str) -> bool:
    try:
        text = Path(folder, file).read_bytes().replace(b"\r\n", b"\n")
    except OSError:
        return False
    return hashlib.sha256(text).hexdigest()[:12] != digest


def _shown(folder: str, file: str) -> str:
    return os.path.relpath(os.path.join(folder, file))
