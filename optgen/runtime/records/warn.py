"""Warnings that point at the line of the user's that led to them, and word of what takes seconds."""

from __future__ import annotations

import logging
import sys
import warnings

OURS = ("optgen.", "torch.", "_optgen_compiled.")
"""Modules through which a user's call passes on its way here; classes that were built elsewhere are looked up."""


def warn(text: str, owner: type = object) -> None:
    """A UserWarning at the innermost frame that is neither the runtime's, nor torch's, nor that of generated code.

    owner   the optimizer's class; where it, or one it is made of, was generated, its module is passed over
    """
    generated = {c.__module__ for c in owner.__mro__ if "SPEC" in vars(c) and "HYPERS" in vars(c)}
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(OURS) and name not in generated:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def tell(text: str) -> None:
    """Log to `optgen` at INFO what is begun and takes seconds; print it where nobody has set up logging and stderr is
    a terminal."""
    log = logging.getLogger("optgen")
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    elif log.level == logging.NOTSET and sys.stderr is not None and sys.stderr.isatty():
        print(f"optgen: {text}", file=sys.stderr, flush=True)
