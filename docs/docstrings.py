"""An extension of griffe, of which mkdocstrings reads docstrings: their arguments become lists, and no mark is lost."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")
"""An argument, or several, and behind two blanks or more what they are."""


class Arguments(griffe.Extension):
    """Turns docstrings into Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class or function."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring with a list item for each argument, whose further lines are indented, and plain asterisks."""
    out: list[str] = []
    inside = False
    for line in re.sub(r"(`[^`]*`)|\*", lambda m: m[1] or r"\*", text).splitlines():
        begins, further = ARGUMENT.fullmatch(line), inside and line.startswith(" ")
        if inside != bool(begins or further):
            out.append("")
        names = begins[1].replace(", ", "`, `") if begins else ""
        out.append(f"- `{names}`: {begins[2]}" if begins else f"  {line.strip()}" if further else line)
        inside = bool(begins or further)
    return "\n".join(out)
