"""Places in the author's source: file, line, column span; excerpts with carets."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType


@dataclass(frozen=True)
class Loc:
    """A span in a file; columns are 0-based bytes of UTF-8, as Python's are, lines 1-based; `function` is the enclosing
    function's name."""

    file: str
    line: int
    col: int = 0
    end_line: int = 0
    end_col: int = 0
    function: str = ""

    @property
    def short(self) -> str:
        return f"{relative(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{relative(self.file)}:{self.line}:{self.column}"

    @property
    def column(self) -> int:
        """The number of the first character, from 1; `col` counts bytes of UTF-8, as Python's columns do."""
        return len(self.source().encode()[: self.col].decode(errors="replace")) + 1 if self.source() else self.col + 1

    def source(self) -> str:
        try:
            return linecache.getline(self.file, self.line).rstrip("\n")
        except LookupError:  # an encoding that Python does not have for texts
            return ""


def of_characters(file: str, line: int, col: int, end_line: int = 0, end_col: int = 0) -> Loc:
    """A span whose columns count characters."""
    start, end = _in_bytes(file, line, col), _in_bytes(file, end_line, end_col)
    return Loc(file, line, start, end_line, end)


def _in_bytes(file: str, line: int, col: int) -> int:
    row = linecache.getline(file, line)  # "" where it cannot be read: `Loc.column` takes the number as it is, too
    return len(row[:col].encode()) + max(col - len(row), 0)


def relative(file: str) -> str:
    """The path below the current directory where it is below it, else as it is."""
    try:
        return Path(file).resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return file


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> tuple[tuple[int | None, int | None, int | None, int | None], ...]:
    return tuple(code.co_positions())


def of_frame(frame: FrameType) -> Loc:
    """The span of the instruction that the frame is executing."""
    code = frame.f_code
    at = _positions(code)
    i = frame.f_lasti // 2
    line, end_line, col, end_col = at[i] if 0 <= i < len(at) else (frame.f_lineno, None, None, None)
    return Loc(code.co_filename, line or frame.f_lineno, col or 0, end_line or line or 0, end_col or 0, code.co_name)


def of_code(code: CodeType) -> Loc:
    """The first line of a function."""
    return Loc(code.co_filename, code.co_firstlineno, function=code.co_name)


def here(depth: int = 1) -> Loc:
    """The span of the operation running `depth` frames above the caller."""
    return of_frame(sys._getframe(depth + 1))
