"""Lines of at most 120 columns: what is longer is broken within its brackets, without a change of its meaning."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

LIMIT = 120
_OPERATORS = re.compile(r" (?=(?:[-+*/|&^]|<<|>>|//|\*\*|<=?|>=?|==|!=|and|or|if|else|in|not in|\?|:) )")


def python(text: str, kernels: bool = False) -> str:
    """Return Python text with its long lines broken; those of docstrings stay, and `kernels` have numbers alone."""
    out: list[str] = []
    inside = False
    for line in _numbered(text, "#", kernels):
        quotes = line.count('"""')
        out += [line] if inside or quotes else _broken(line, "#")
        inside ^= quotes % 2 == 1
    return "\n".join(out)


def cpp(text: str) -> str:
    """Return C++ text with its long lines broken, lines of the preprocessor left alone."""
    out: list[str] = []
    for line in _numbered(text, "//", True):
        if line.lstrip().startswith("#") or line.endswith("\\"):
            out.append(line)
        else:
            out += _broken(line, "//")
    return "\n".join(out)


def _numbered(text: str, mark: str, alone: bool) -> Iterator[str]:
    """Yield lines of text in which the author's lines stand once, and their numbers at every further place.

    alone  numbers have no lines beside them: the strict tiles of a rule have these
    """
    seen: set[str] = set()
    number = ""
    for line in text.split("\n"):
        code, found, comment = line.rpartition(f"{mark} ")
        if found and re.match(r"\d+  ", comment) and (alone or comment in seen):
            line = f"{code}{mark} {comment.split()[0]}"
            if not code.strip():
                number = line
                continue
        elif found:
            seen.add(comment)
        if number and len(line) + len(number.strip()) + 2 <= LIMIT and not line.endswith("\\"):
            line = f"{line}  {number.strip()}"
        elif number:
            yield number
        number = ""
        yield line


def _broken(line: str, mark: str) -> list[str]:
    if len(line) <= LIMIT:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    body = line.strip()
    if body.startswith(mark):
        return _filled(body[len(mark) :].strip(), f"{indent}{mark} ")
    code, found, comment = body.partition(f"  {mark} ")
    if found:
        return [*_filled(comment, f"{indent}{mark} "), *_broken(indent + code.rstrip(), mark)]
    spans = _spans(body)
    first, last = max(spans, key=lambda s: s[1] - s[0], default=(0, 0))
    if 2 * (last - first) < len(body) or len(indent) + first + 1 > LIMIT:
        if mark != "#":
            return textwrap.wrap(body, LIMIT, initial_indent=indent, subsequent_indent=indent + "    ")
        statement = re.match(r"return |[\w, ]+ = ", body)
        if body.endswith("(") or statement is None and not spans:  # it goes on in the next line
            return [line]
        if statement is not None:
            inner = _inside(body[statement.end() :], indent + "    ", mark)
            return [f"{indent}{statement.group()}(", *inner, f"{indent})"]
    head, inner_text, tail = body[: first + 1], body[first + 1 : last], body[last:]
    return [indent + head, *_inside(inner_text, indent + "    ", mark), *_broken(indent + tail, mark)]


def _filled(comment: str, lead: str) -> list[str]:
    return textwrap.wrap(comment, LIMIT, initial_indent=lead, subsequent_indent=lead + "    ", break_long_words=False)


def _spans(body: str) -> list[tuple[int, int]]:
    """Return the places of the outermost brackets that are opened and closed here, strings left out."""
    out: list[tuple[int, int]] = []
    opened: list[int] = []
    quote = ""
    for k, c in enumerate(body):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "([{":
            opened.append(k)
        elif c in ")]}" and opened:
            start = opened.pop()
            if not opened:
                out.append((start, k))
    return out


def _inside(inner: str, indent: str, mark: str) -> list[str]:
    """Return the lines of what stands between brackets: broken at its commas, or at its operators."""
    outer = _spans(inner)

    def is_outer(k: int) -> bool:
        return not any(a < k < b for a, b in outer)

    commas = [k + 1 for k, c in enumerate(inner) if c == "," and is_outer(k)]
    places = commas or [m.start() for m in _OPERATORS.finditer(inner) if is_outer(m.start())]
    parts = [inner[a:b].strip() for a, b in zip([0, *places], [*places, len(inner)], strict=True)]
    return _joined([part for part in parts if part], indent, mark)


def _joined(parts: list[str], indent: str, mark: str) -> list[str]:
    """Fill lines with parts; one that is longer than a line is broken itself."""
    out: list[str] = []
    line = indent + parts[0]
    for part in parts[1:]:
        if len(line) + 1 + len(part) <= LIMIT:
            line += f" {part}"
        else:
            out.append(line)
            line = indent + part
    out.append(line)
    if len(parts) == 1 and len(out[0]) > LIMIT and not [s for s in _spans(out[0]) if s[1] - s[0] >= 24]:
        return out
    return [x for one in out for x in _broken(one, mark)]
