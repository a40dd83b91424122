"""The output and the exit codes of commands: plain lines for people, one JSON object for programs.

Results go to stdout; notes and errors to stderr. With `--json` stdout holds exactly one object, whatever happens.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

from optgen.base.errors import UserError
from optgen.base.loc import relative

OK = 0
DIFFERENT = 1  # a check found something
WRONG_INPUT = 2
MISSING = 3  # this machine lacks something
INTERNAL = 70
INTERRUPTED = 130

SCHEMA = 1  # of the JSON objects; grows when a field changes its meaning


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class Missing(Exception):
    """Something that a command needs and this machine does not have."""


class Terminal:
    """The output of one command: its result, its messages and its exit code.

    quiet    results, warnings and errors only
    verbose  also what optgen logs, and tracebacks of a user's errors
    as_json  one JSON object on stdout
    """

    def __init__(self, command: str, quiet: bool = False, verbose: bool = False, as_json: bool = False) -> None:
        self.command, self.quiet, self.verbose, self.as_json = command, quiet, verbose, as_json
        self.code = OK
        self.result: dict[str, Any] = {}

    def show(self, text: str) -> None:
        """Show a part of the result, for people; a terminal gets long lines of text in several, indented."""
        if self.as_json:
            return
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            text = "\n".join(line if "  " in line.strip() else _wrapped(line, width) for line in text.split("\n"))
        print(text)

    def note(self, text: str) -> None:
        """Write a message to stderr, but under -q."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Write a warning or an error to stderr."""
        print(text, file=sys.stderr)

    def fail(self, code: int = DIFFERENT) -> None:
        self.code = max(self.code, code)

    def error(self, code: int, text: str, data: Mapping[str, Any] | None = None) -> None:
        """Write the error that ends the command, and set its exit code."""
        self.code = code
        self.result = {"error": data or {"message": text}}
        self.warn(text)

    def run(self, command: Callable[[Terminal], None]) -> int:
        """Run a command and return its exit code: every way to end has one, and a user's mistake has no traceback."""
        if self.verbose:
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("optgen").setLevel(logging.DEBUG)
        try:
            # A spec that prints while it is loaded would write before the object.
            with redirect_stdout(sys.stderr) if self.as_json else nullcontext():
                try:
                    command(self)
                except (Exception, KeyboardInterrupt) as error:
                    self._report(error)
            if self.as_json:
                head = {"optgen": SCHEMA, "command": self.command, "ok": self.code == OK, "exit": self.code}
                print(json.dumps(head | self.result, indent=2, default=str))
            sys.stdout.flush()
        except BrokenPipeError:  # of a reader that has seen enough; Python writes the rest when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return self.code

    def _report(self, error: BaseException) -> None:
        match error:
            case UserError():
                if self.verbose:
                    sys.stderr.write("".join(traceback.format_tb(error.__traceback__)))
                self.error(WRONG_INPUT, str(error), as_fields(error))
            case Missing():
                self.error(MISSING, f"missing: {error}")
            case ModuleNotFoundError(name="jinja2" | "sympy" | "torch" as name):
                self.error(MISSING, f"missing: {name}, which this needs: pip install {name}")
            case KeyboardInterrupt():
                self.error(INTERRUPTED, "interrupted")
            case BrokenPipeError():
                raise error
            case _:
                sys.stderr.write("".join(traceback.format_exception(error)))
                kind = type(error).__name__
                self.error(INTERNAL, f"internal error: {kind}: {error}; this is a fault of optgen")


def as_fields(error: UserError) -> dict[str, Any]:
    """Return a user error as data."""
    own = ("line", "column", "function")
    places = [{"file": relative(x.file)} | {name: getattr(x, name) for name in own} for x in error.locs]
    return {"code": error.code, "message": error.message, "places": places, "note": error.note, "hint": error.hint}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as lines of columns, a row a line."""
    cells = [list(map(str, row)) for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines).lstrip("\n")
