"""What memory allows: a compiled loop that moves the bytes of an optimizer's step and computes nothing."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from optgen.runtime import native

SOURCE = Path(__file__).resolve().parent / "ceiling.cpp"
PIECE = 512
"""Elements of a piece, which holds whole words of 8 bytes of every stream."""

RUN = 64
"""Words of one stream in a row, then comes the next stream: as an optimizer's loop goes, without its arithmetic."""

GRAIN = 64
"""Streams are as wide as whole 64ths of a byte per element: words per piece."""

PAGE, SKEW = 4096, 576
"""Streams start at different offsets within a page (bytes): equal ones would fight for the same lines of the cache."""


class Unavailable(Exception):
    """No ceiling can be measured here; the text says why."""


@dataclass(frozen=True)
class Streams:
    """Bytes per element that a step moves: of each stream that it reads and writes back, and that it only reads.

    >>> Streams((4.0, 4.0, 4.0), (4.0,)).total
    28.0
    """

    changed: tuple[float, ...]
    read: tuple[float, ...]

    @property
    def total(self) -> float:
        return 2 * sum(self.changed) + sum(self.read)

    @property
    def kept(self) -> float:
        """Bytes per element that stay from step to step."""
        return sum(self.changed)

    @property
    def pattern(self) -> Streams:
        """The same to whole 64ths of a byte: what a ceiling is measured of.

        >>> Streams((2.0, 1.002, 0.03125, 1e-5), (2.0,)).pattern
        Streams(changed=(2.0, 1.0, 0.03125), read=(2.0,))
        """
        rounded = [tuple(round(size * GRAIN) / GRAIN for size in sizes) for sizes in (self.changed, self.read)]
        changed, read = (tuple(size for size in sizes if size) for sizes in rounded)
        return Streams(changed, read)

    @property
    def words(self) -> str:
        """
        >>> Streams((2.0, 1.0, 1.0, 0.03125), (2.0,)).words
        'changed 2 + 2 x 1 + 0.03125 B, read 2 B'
        """
        return ", ".join(f"{verb} {_sum(sizes)} B" for verb, sizes in (("changed", self.changed), ("read", self.read)))


def _sum(sizes: Sequence[float]) -> str:
    counts = {size: sizes.count(size) for size in sizes}
    return " + ".join(f"{count} x {size:.4g}" if count > 1 else f"{size:.4g}" for size, count in counts.items())


def library() -> ctypes.CDLL:
    """The compiled loop."""
    compiler = native.compiler()
    if compiler is None:
        raise Unavailable(native.no_compiler())
    native.share_openmp()
    folder = Path(tempfile.mkdtemp(prefix="ceiling-"))
    try:
        built = _build(compiler.command, folder / "ceiling.so")
        loaded = ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is loaded stays
    loaded.sweep.restype = ctypes.c_uint64
    return loaded


def _build(command: Sequence[str], out: Path) -> Path:
    errors = ""
    # OpenMP is torch's: it is loaded already, under the name that this library asks for.
    for flags in (["-march=native"], ["-mcpu=native"], []):
        words = [*command, "-O3", *flags, "-fopenmp", "-shared", "-fPIC", str(SOURCE), "-o", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 0:
            return out
        errors = done.stderr
    raise Unavailable(f"the C++ compiler refuses it: {errors.strip()[:300]}")


class Memory:
    """What all ceilings of a section share, on huge pages where the machine gives them."""

    def __init__(self, patterns: Sequence[Streams], numel: int) -> None:
        self.pieces = -(-numel // PIECE)
        most = max(len(s.changed) + len(s.read) for s in patterns)
        widest = max(s.kept + sum(s.read) for s in patterns)
        size = int(widest * PIECE) * self.pieces + most * (2 * PAGE) + PAGE
        self._mapped = mmap.mmap(-1, size)
        if hasattr(self._mapped, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

    def streams(self, words: Sequence[int]) -> list[int]:
        """Addresses of streams of that many words per piece."""
        at, found = -(-self._start // PAGE) * PAGE, []
        for k, count in enumerate(words):
            found.append(at + k * SKEW % PAGE)
            at = -(-(found[-1] + 8 * count * self.pieces) // PAGE) * PAGE
        return found


class Ceiling:
    """One pattern over the shared memory; `step` makes one sweep over it."""

    def __init__(self, loop: ctypes.CDLL, pattern: Streams, memory: Memory) -> None:
        words = [round(size * GRAIN) for size in (*pattern.changed, *pattern.read)]
        starts = memory.streams(words)
        runs = order(words)
        array = ctypes.c_int64 * len(runs)
        self._memory = memory  # holds what the addresses point to
        self._sweep = loop.sweep
        self._arguments = (
            ctypes.c_int64(memory.pieces),
            ctypes.c_int64(len(runs)),
            array(*(starts[stream] + 8 * first for stream, first, _ in runs)),
            array(*(words[stream] for stream, _, _ in runs)),
            array(*(count for _, _, count in runs)),
            array(*(stream < len(pattern.changed) for stream, _, _ in runs)),
        )

    def step(self) -> None:
        self._sweep(*self._arguments, ctypes.c_int(torch.get_num_threads()))


def order(words: Sequence[int]) -> list[tuple[int, int, int]]:
    """(stream, first word, words) of the runs of a piece: all streams get on with it at the same pace.

    >>> order([128, 64])
    [(0, 0, 64), (1, 0, 64), (0, 64, 64)]
    """
    runs = [(s, first, min(RUN, count - first)) for s, count in enumerate(words) for first in range(0, count, RUN)]
    return sorted(runs, key=lambda run: (run[1] / words[run[0]], run[0]))
