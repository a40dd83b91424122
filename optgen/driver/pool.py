"""A pool of functions as text: equal ones share a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from optgen.base.names import unique


@dataclass
class FunctionPool:
    """Functions by their text: equal text is generated once.

    `scalars` are the names of the function's host scalars: two functions that differ in nothing else are one,
    because scalars are passed by position.
    """

    names: dict[str, str] = field(default_factory=dict)
    functions: list[list[str]] = field(default_factory=list)

    def add(self, wanted: str, make: Callable[[str], list[str]], scalars: Sequence[str] = ()) -> str:
        """Return the name of `make(name) -> lines`, which is that of an equal function where there is one."""
        name, new = self.name(wanted, make("@"), scalars)
        if new:
            self.functions.append(make(name))
        return name

    def name(self, wanted: str, lines: Sequence[str], scalars: Sequence[str] = ()) -> tuple[str, bool]:
        """Return the name of a function whose lines under the name @ are these, and whether it is new."""
        marker = "\n".join(lines)
        if scalars:
            # Comments are aligned to names' lengths, so blanks do not count either.
            marker = " ".join(replaced(marker, {name: f"${i}" for i, name in enumerate(scalars)}).split())
        if marker in self.names:
            return self.names[marker], False
        name = self.names[marker] = unique(wanted, {*self.names.values()})
        return name, True


@lru_cache(maxsize=256)
def _words(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?<![@\w])(?:{'|'.join(map(re.escape, names))})(?!\w)")


def replaced(text: str, names: Mapping[str, str]) -> str:
    """Return the text with whole words replaced; an @ before a word is part of it."""
    # Looked for one by one first: few of many names are in a text, and each alternative of the pattern takes its time.
    found = tuple(old for old, new in names.items() if old != new and old in text)
    return _words(found).sub(lambda word: names[word[0]], text) if found else text
