"""Paragraphs and tables of the documents that tools write."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence


def filled(text: str) -> str:
    """Return the document with its paragraphs filled to 120 columns; tables, lists, headings and code stay."""
    out = []
    for part in text.split("\n\n"):
        plain = not part.startswith(("|", "-", "#", " ", "<", "\n"))
        out.append(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) if plain else part)
    return "\n\n".join(out)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a Markdown table, its columns aligned to the right but for those in `left`."""
    rule = "".join("---|" if column in left else "--:|" for column in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{rule}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def packed(record: object) -> str:
    """Return the text of a JSON file with a list of numbers, or of words, a line."""
    return re.sub(r"\n(?=[^][{}]*\])", "", json.dumps(record, indent=0)) + "\n"
