"""Ctrl-C waits until a step is whole.

Python runs a signal's handler between two of its instructions, so one that came while a C++ kernel ran, where most of a
step's time goes, raises KeyboardInterrupt as the kernel returns: the weights have moved, and nothing has been counted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_MAIN = threading.main_thread().ident

# What the module's functions call once they have made numbers of enumerations: 1.6 us instead of 16 for two of each.
_raw: Any = vars(signal).get("_signal", signal)
_get: Callable[[int], Any] = _raw.getsignal
_set: Callable[[int, Any], Any] = _raw.signal
_SIGINT = int(signal.SIGINT)


class Later:
    """Around what is to be done whole: SIGINT is handled behind it, by whoever handled it before; a second one at once.

    Only on the main thread, where handlers run, and where Python has a handler.
    """

    __slots__ = ("_asked", "_before")

    def __init__(self) -> None:
        self._before: Any = None
        self._asked: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            handler = _get(_SIGINT)
            if callable(handler):
                self._before = handler
                _set(_SIGINT, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = number, frame
            return
        before, self._before = self._before, None
        _set(_SIGINT, before)
        before(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _set(_SIGINT, self._before)
            if self._asked is not None:
                self._before(*self._asked)
