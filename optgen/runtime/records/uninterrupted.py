"""Make a step for all parameters or for none: hold Ctrl-C back while it changes them, and note what an error leaves."""

from __future__ import annotations

import sys
import threading
from signal import SIGINT
from types import FrameType
from typing import Any

_signal: Any = sys.modules["_signal"]
"""The module under `signal`, whose own functions turn handlers into enums and back in several microseconds."""


class Uninterrupted:
    """A context in which the first Ctrl-C waits for the end; the second one interrupts at once.

    begun   the names of what was begun to be changed since the context was entered; whoever changes it adds them first.
            Empty after a context that no error has left

    Inside itself it is a part of the outer context.  Only the main thread receives signals; elsewhere, inside another
    such context, and where SIGINT has no handler of Python's, none is held back.
    """

    def __init__(self) -> None:
        self.begun: list[str | int] = []
        self.depth, self.pressed = 0, False
        self.handler: Any = None

    @property
    def torn(self) -> list[str | int]:
        """The names in `begun` when an error left the context; none inside of it."""
        return [] if self.depth else self.begun

    def __enter__(self) -> list[str | int]:
        if not self.depth:
            self.pressed = False
            if threading.current_thread() is threading.main_thread():
                handler = _signal.getsignal(SIGINT)
                if callable(handler) and not isinstance(getattr(handler, "__self__", None), Uninterrupted):
                    self.handler = handler
                    _signal.signal(SIGINT, self._press)
        self.depth += 1
        return self.begun

    def _press(self, number: int, frame: FrameType | None) -> None:
        before, self.pressed = self.pressed, True
        if before:
            self._end(frame)

    def _end(self, frame: FrameType | None = None) -> None:
        """Leave the context, from wherever a second Ctrl-C finds it; its handler gets what was held back."""
        self.depth, handler, self.handler = 0, self.handler, None
        if handler is not None:
            _signal.signal(SIGINT, handler)
            if self.pressed:
                handler(SIGINT, frame)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.depth -= 1
        if self.depth <= 0:
            if kind is None:
                self.begun.clear()
            self._end()
