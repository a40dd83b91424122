"""The output and the exit codes of commands: rich text for people, one JSON object for programs.

Results go to stdout; progress, notes and errors to stderr. With `--json` stdout holds exactly one object, whatever
happens. NO_COLOR and pipes turn colours off; in pipes tables are plain columns, a row a line.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.util import find_spec
from typing import Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from optgen.base import extras
from optgen.base.errors import UserError
from optgen.base.loc import relative

OK = 0
DIFFERENT = 1  # a check found something
WRONG_INPUT = 2
MISSING = 3  # this machine lacks something
INTERNAL = 70
INTERRUPTED = 130

SCHEMA = 1  # of the JSON objects; grows when a field changes its meaning

Item = TypeVar("Item")


class Missing(Exception):
    """Something that a command needs and this machine does not have."""


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `session`: a reader that closes the pipe is no error."""
        raise BrokenPipeError


class Terminal:
    """The output of one command: its result, its messages and its exit code.

    quiet    results and errors only
    verbose  also what optgen logs, the command's seconds, and tracebacks of a user's errors
    as_json  one JSON object on stdout
    """

    quiet = verbose = as_json = False

    def __init__(self, command: str) -> None:
        self.command = command
        self.code = OK
        self.silent = False
        self.result: dict[str, Any] = {}
        self.out = _Out(highlight=False, width=_width(sys.stdout))
        self.err = Console(stderr=True, highlight=False, width=_width(sys.stderr))

    def show(self, *what: RenderableType) -> None:
        """Show a part of the result, for people."""
        if self.as_json:
            return
        text = all(isinstance(x, (str, Text)) for x in what)
        if not text and not self.out.is_terminal:  # tables are padded to the console's width
            for x in what:
                if isinstance(x, Table):
                    x.box = None
            with self.out.capture() as printed:
                self.out.print(*what, markup=False)
            what, text = ("\n".join(line.rstrip() for line in printed.get()[:-1].split("\n")),), True
        self.out.print(*what, markup=False, soft_wrap=text)

    def show_filled(self, text: str, indent: int = 11) -> None:
        """Show one line, wrapped with a hanging indent where there is a width to keep to."""
        if _width(sys.stdout) is None:
            text = textwrap.fill(
                text, self.out.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
        self.show(text)

    def log(self, text: str, style: str = "") -> None:
        """Write a message to stderr; errors are red."""
        if self.quiet and style != "red":
            return
        self.err.print(Text(text, style=style), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Write a warning, under -q too: of something that is not done."""
        self.err.print(Text(text, style="yellow"), soft_wrap=True)

    def fail(self, code: int = DIFFERENT) -> None:
        self.code = max(self.code, code)

    def track(self, items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
        """Yield the items and advance a progress bar, where stderr is a terminal."""
        with self.counter(what, total) as advance:
            for item in items:
                yield item
                advance()

    @contextmanager
    def counter(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a progress bar, where stderr is a terminal; yield the function that advances it."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        hidden = self.quiet or not self.err.is_terminal
        with Progress(*columns, console=self.err, transient=True, disable=hidden) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    def finish(self) -> None:
        """Write the JSON object, if one was requested."""
        if self.as_json and not self.silent:
            head = {"optgen": SCHEMA, "command": self.command, "ok": self.code == OK, "exit": self.code}
            sys.stdout.write(json.dumps(head | self.result, indent=2, default=str, allow_nan=True) + "\n")

    def error(self, code: int, text: str) -> None:
        self.code = code
        self.result["error"] = {"message": text}
        self.log(text, "red")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a plain table; cells are shown as they are, without markup, and short names of rows in one piece."""
    out = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    cells = list(rows)
    for k, name in enumerate(columns):
        out.add_column(Text(name), overflow="fold", no_wrap=not k and all(len(str(row[0])) <= 30 for row in cells))
    for row in cells:
        out.add_row(*(Text(str(cell)) for cell in row))
    return out


def _width(stream: Any) -> int | None:
    """Return a width for pipes and files in which no table's cell is wrapped; None lets rich decide."""
    return None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else 1000


@contextmanager
def session(command: str) -> Iterator[Terminal]:
    """Run a command's body: every way to end has its exit code, and a user's mistake has no traceback."""
    terminal, start = Terminal(command), time.perf_counter()
    if terminal.verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("optgen").setLevel(logging.DEBUG)
    try:
        # A spec that prints while it is loaded would write before the object.
        with redirect_stdout(sys.stderr) if terminal.as_json else nullcontext():
            yield terminal
    except (typer.Exit, typer.Abort):
        raise
    except (Exception, KeyboardInterrupt) as error:
        _report(terminal, error)
    if terminal.verbose:
        terminal.log(f"{command}: {time.perf_counter() - start:.2f} s", "dim")
    try:
        terminal.finish()
        sys.stdout.flush()
    except OSError as error:
        _not_written(terminal, error)
    if terminal.code:
        raise typer.Exit(terminal.code)


def _report(terminal: Terminal, error: BaseException) -> None:
    """Write the error that ended a command, and set its exit code."""
    match error:
        case UserError():
            terminal.code = WRONG_INPUT
            terminal.result = {"error": as_fields(error)}
            if terminal.verbose:
                sys.stderr.write("".join(traceback.format_tb(error.__traceback__)))
            _print_error(terminal, str(error))
        case Missing():
            terminal.error(MISSING, f"missing: {error}")
        case KeyboardInterrupt():
            terminal.error(INTERRUPTED, "interrupted")
        case BrokenPipeError():
            _not_written(terminal, error)
            terminal.code, terminal.silent = OK, True
        case OSError(filename=None, errno=errno.ENOSPC):
            _not_written(terminal, error)
        case ModuleNotFoundError() if missing := extras.advice(error):
            terminal.error(MISSING, f"missing: {missing}")
        case _:
            sys.stderr.write("".join(traceback.format_exception(error)))
            kind = type(error).__name__
            terminal.error(INTERNAL, f"internal error: {kind}: {error}; this is a fault of optgen")


def _not_written(terminal: Terminal, error: OSError) -> None:
    """Send the rest of stdout, which Python writes when it ends, to nowhere; a closed pipe is no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if not isinstance(error, BrokenPipeError):
        terminal.error(WRONG_INPUT, f"the output cannot be written: {error.strerror}")


def as_fields(error: UserError) -> dict[str, Any]:
    """Return a user error as data."""
    own = ("line", "column", "function")
    places = [{"file": relative(x.file)} | {name: getattr(x, name) for name in own} for x in error.locs]
    return {"code": error.code, "message": error.message, "places": places, "note": error.note, "hint": error.hint}


def _print_error(terminal: Terminal, text: str) -> None:
    """Write the error, its first line and its carets in red."""
    styled = Text()
    for k, line in enumerate(text.splitlines()):
        caret = line.lstrip(" |").startswith("^")
        styled.append(line + "\n", "bold red" if k == 0 else "red" if caret else "")
    terminal.err.print(styled, end="", soft_wrap=True)


def run(app: typer.Typer, words: list[str]) -> int:
    """Run the program and return its exit code; with --json a wrong option is reported as an object as well."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process; the exit code is still right
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        code = app(args=words, prog_name="optgen", standalone_mode=False)
    except Exception as error:
        message: Callable[[], str] | None = getattr(error, "format_message", None)
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # no command was named
            print(message(), file=sys.stderr)  # the help, in releases of click that have not shown it
            return WRONG_INPUT
        if "--json" in words:
            Terminal.as_json, terminal = True, Terminal("")
            terminal.error(WRONG_INPUT, message())
            terminal.finish()
        else:
            context = getattr(error, "ctx", None)
            Console(stderr=True, highlight=False).print(Text(f"error: {message()}", style="red"))
            where = context.command_path if context is not None else "optgen"
            sys.stderr.write(f"{where} --help says what there is\n")
        return WRONG_INPUT
    return code if isinstance(code, int) else OK


def interpreted(t: Terminal, arguments: Sequence[str]) -> bool:
    """Run a command for Triton in a process that interprets it, as is decided at its import, and reports everything.

    Returns False, with nothing run, where this process can run Triton kernels itself.  Raises Missing without Triton.
    """
    if find_spec("triton") is None:
        raise Missing("Triton; `optgen doctor` says what is here")
    from torch import cuda

    if os.environ.get("TRITON_INTERPRET") == "1" or cuda.is_available():
        return False
    # NumPy warns of every overflow that an example provokes on purpose.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    done = subprocess.run([sys.executable, "-m", "optgen", *arguments], env=environment, check=False)
    t.code, t.silent = done.returncode, True
    return True
