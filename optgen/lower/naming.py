"""Names for what a format computes: its own local variables, behind the name of the state.

A format is traced by calling it, so the names its author gave are read off the source: the last operation
made while an assignment of the format's code ran is that assignment's value.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType

from optgen.ir.node import Node
from optgen.ir.program import Let, Section


@lru_cache(maxsize=256)
def _targets(file: str) -> dict[int, tuple[int, str]]:
    """Line -> (first line of the assignment over it, its target), for single-name assignments of a file."""
    try:
        tree = ast.parse(Path(file).read_bytes())  # its first line may name another encoding than UTF-8
    except (OSError, SyntaxError, ValueError):
        return {}
    out: dict[int, tuple[int, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                out[line] = node.lineno, node.targets[0].id
    return out


class Recorder:
    """A collection of lets for one value being encoded or decoded; pass `self` as the record of its Values."""

    def __init__(self, prefix: str, stage: Section) -> None:
        self.prefix, self.stage = prefix, stage
        self.found: dict[tuple[int, int], tuple[str, Node]] = {}
        self.order: dict[int, int] = {}  # node uid -> when it was made here; uids tell of earlier programs too
        self.frames: dict[int, FrameType] = {}  # kept alive, so that no two calls have one id

    def __call__(self, node: Node) -> Node:
        self.order.setdefault(node.uid, len(self.order))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("optgen.lower"):
            if not frame.f_globals.get("__name__", "").startswith("optgen.lang"):
                statement = _targets(frame.f_code.co_filename).get(frame.f_lineno)
                if statement is not None:
                    self.frames[id(frame)] = frame
                    self.found[id(frame), statement[0]] = statement[1], node
            frame = frame.f_back
        return node

    def lets(self) -> list[Let]:
        """A let for every named value, in the order they were made; to be called once, at the end."""
        out = []
        for target, node in self.found.values():
            name = target if target.startswith(self.prefix) else f"{self.prefix}_{target}"
            out.append(Let(name.strip("_"), node, self.stage))
        self.frames.clear()  # they hold what holds this recorder
        return sorted(out, key=lambda let: self.order[let.node.uid])
