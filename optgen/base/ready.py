"""The folders of the ready-made specs and optimizers: inside the package in a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def specs_dir() -> Path:
    """The folder of the ready-made specs and plans (adamw.py, ..., plans.py)."""
    inside = _PACKAGE / "_specs"
    return inside if inside.is_dir() else _PACKAGE.parent / "specs"


def generated_dir() -> Path:
    """The folder of the ready-made generated optimizers."""
    beside = _PACKAGE.parent / "generated"
    return beside if is_checkout() else _PACKAGE / "_generated"


def is_checkout() -> bool:
    """Return True if this package runs from a checkout of the repository rather than from a wheel."""
    return not (_PACKAGE / "_specs").is_dir()
