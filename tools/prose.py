"""Paragraphs of the documents that tools write."""

from __future__ import annotations

import textwrap


def filled(text: str) -> str:
    """The document with its paragraphs filled to 120 columns; tables, lists, headings, code and marks as they are."""
    out = []
    for part in text.split("\n\n"):
        plain = not part.startswith(("|", "-", "#", " ", "<", "\n"))
        out.append(textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False) if plain else part)
    return "\n\n".join(out)
