"""What is wrong with something that was given, collected to say it at once."""

from __future__ import annotations

SHOWN = 8
"""How many misfits an error lists before it only counts them."""


class Misfits:
    """Lines under a heading."""

    def __init__(self, heading: str) -> None:
        self.heading = heading
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None:
        """ValueError where anything was added."""
        if self.lines:
            more = [f"... and {len(self.lines) - SHOWN} more"] if len(self.lines) > SHOWN else []
            raise ValueError("\n  ".join([f"{self.heading}:", *self.lines[:SHOWN], *more]))
