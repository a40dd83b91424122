"""Hold Ctrl-C back while a step changes states and weights, so that it is made for all parameters or for none."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which the first Ctrl-C waits for the end; the second one interrupts at once.

    Only the main thread receives signals; elsewhere, inside another such context, and where SIGINT has no handler of
    Python's, it does nothing.
    """

    def __enter__(self) -> None:
        self.handler: Any = None
        self.pressed = False
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), Uninterrupted):
                self.handler = handler
                signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            self.handler(number, frame)
        self.pressed = True

    def __exit__(self, *error: object) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
            if self.pressed:
                self.handler(signal.SIGINT, None)
