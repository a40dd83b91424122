"""The problems of an input, collected to be raised at once."""

from __future__ import annotations

SHOWN = 8
"""The number of problems that an error lists; it counts the rest."""


class Problems:
    """Lines under a heading."""

    def __init__(self, heading: str) -> None:
        self.heading = heading
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None:
        """Raise ValueError if there is a line."""
        if self.lines:
            more = [f"... and {len(self.lines) - SHOWN} more"] if len(self.lines) > SHOWN else []
            raise ValueError("\n  ".join([f"{self.heading}:", *self.lines[:SHOWN], *more]))
