"""The ready-made specs and plans: their folder, and what can be said of them without the compiler."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from optgen.base.names import camel

_PACKAGE = Path(__file__).resolve().parent.parent

SOURCES = (
    "backends", "base", "driver", "formats", "ir", "lang", "lower", "ops", "passes", "runtime/records", "verify",
)  # fmt: skip
"""Rooms whose text decides what is generated; of the runtime only the records, whose defaults are left out of text."""

_DECORATOR = re.compile(r"^@optimizer\(.*?^def (\w+)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r'\bname="(\w+)"')
_WRAPPED = re.compile(r"^(\w+) = (\w+)\(\s*(\w+)", re.MULTILINE)


def specs_dir() -> Path:
    """The folder of the ready-made specs and plans (adamw.py, ..., plans.py): in a wheel inside the package."""
    inside = _PACKAGE / "_specs"
    return inside if inside.is_dir() else _PACKAGE.parent / "specs"


def is_checkout() -> bool:
    """Return True if this package runs from a checkout of the repository rather than from a wheel."""
    return not (_PACKAGE / "_specs").is_dir()


def _texts() -> dict[str, str]:
    """Return rule -> the text of its file."""
    files = (file for file in sorted(specs_dir().glob("*.py")) if file.stem not in ("__init__", "plans"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@cache
def classes() -> dict[str, str]:
    """Return class name -> rule of the ready-made ones, from the text of their specs: {"AdamW": "adamw", ...}."""
    texts, found = _texts(), {}
    for rule, text in texts.items():
        if (made := _DECORATOR.search(text)) is not None:
            found[rule] = named[1] if (named := _NAME.search(made[0])) is not None else camel(made[1])
    for rule, text in texts.items():
        if rule not in found and (made := _WRAPPED.search(text)) is not None:
            found[rule] = camel(made[2]) + found[made[3]]
    return {name: rule for rule, name in sorted(found.items(), key=lambda pair: pair[1])}


@cache
def plans() -> tuple[str, ...]:
    """Return the names of the ready-made plans, in their order."""
    return tuple(re.findall(r"^(\w+) = Plan\(", (specs_dir() / "plans.py").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def key() -> str:
    """Return a hash of everything that the ready-made optimizers are generated from: the compiler and the specs."""
    files = [file for room in SOURCES for file in (_PACKAGE / room).rglob("*") if file.suffix in (".py", ".j2")]
    whole = hashlib.sha256()
    for file in (*sorted(files), *sorted(specs_dir().glob("*.py"))):
        content = file.read_bytes()
        whole.update(f"{file.name} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:16]
