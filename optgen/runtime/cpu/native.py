"""C++ kernels: compiled at first use, kept in the cache (cpu/cache.py), loaded with ctypes.

A library is named after a hash of all that shaped it (source, headers, flags, compiler, instruction set).  Beside it
stands a checksum of that hash and of its content.  It is checked before the file is opened as a library, because a
truncated one would end the process at its first page fault.

Environment: OPTGEN_CACHE (the cache), CXX (the compiler), OPTGEN_ISA (the instruction set).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optgen.runtime.cpu import cache
from optgen.runtime.records.warn import tell

HEADERS = Path(__file__).resolve().parent / "cpp"

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv",
    "-fvisibility=hidden", "-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-parentheses",
)  # fmt: skip
"""Never -ffast-math: linked in, it flushes subnormals to zero in the whole process.  What is not warned of: the
compilers' own headers leave registers undefined on purpose, and shifts beside sums are meant as generated."""

GCC_FLAGS = ("-fschedule-insns", "-fsched-pressure", "--param=max-completely-peeled-insns=400")
"""Neighbours of a loop that was written out are interleaved, so that a processor finds more to do at a time: 6 % of
AdamW int8_split24 (Zen 5; `tools.bench kernel`), of some rules nothing, for 0.15 s to compile.  Loops of up to 400
instructions, not 200, are written out: another 4 % with AVX2.  Others do not know these flags."""

SHOWN = 4000
"""Characters of a compiler's message in an error: its first one is what the others follow from."""


class Unavailable(RuntimeError):
    """A kernel cannot be had; the text says why, with the compiler's own message where there is one."""


# -- what this machine has


@dataclass(frozen=True)
class Isa:
    """An instruction set, and what Linux and compilers call the parts that it needs: "avx2" and "-mavx2"."""

    name: str
    needs: frozenset[str]

    @property
    def flags(self) -> list[str]:
        return [f"-m{part}" for part in sorted(self.needs)]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}

ISAS = (
    Isa("avx512vbmi", _AVX512 | {"avx512vbmi"}),
    Isa("avx512", _AVX512),
    Isa("avx2", _AVX2),
    Isa("portable", frozenset()),
)
"""Best first."""


@functools.cache
def first_level_cache() -> int:
    """Bytes of a core's first-level data cache; 32 KiB where the system does not say.

    Kernels keep values of a tile in it (`elements_of_tile` in optgen.h); docs/cpu.md says what that saves.
    """
    said = 0
    with suppress(OSError, ValueError):
        said = os.sysconf("SC_LEVEL1_DCACHE_SIZE")
    return said if said > 0 else 32 << 10


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the part of `Isa.needs` that this CPU has, under a kernel that saves its registers; Linux says so."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split()) & ISAS[0].needs
    return frozenset()


def isa() -> Isa:
    """The best instruction set of this CPU, or the one that OPTGEN_ISA names.

    Raises ValueError for an unknown name, RuntimeError for one that the CPU has not.
    """
    asked = os.environ.get("OPTGEN_ISA", "")
    if not asked:
        return next(isa for isa in ISAS if isa.needs <= cpu_flags())
    named = {isa.name: isa for isa in ISAS}
    if asked not in named:
        raise ValueError(f"OPTGEN_ISA must be one of {', '.join(named)}, got {asked!r}")
    if missing := named[asked].needs - cpu_flags():
        raise RuntimeError(f"OPTGEN_ISA={asked}, but this CPU has no {', '.join(sorted(missing))}")
    return named[asked]


@dataclass(frozen=True)
class Compiler:
    """The command that calls a compiler, its own description, and flags that other compilers do not know."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...] = ()


def compiler() -> Compiler | None:
    """$CXX, else c++, g++ or clang++: the first that answers; None where there is none."""
    return _compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.cache
def _compiler(asked: str, path: str) -> Compiler | None:
    for candidate in [asked] if asked.strip() else ["c++", "g++", "clang++"]:
        words = candidate.split()
        found = shutil.which(words[0], path=path)
        if found is None or sys.platform == "win32":  # MSVC knows none of the flags
            continue
        command = (os.path.abspath(found), *words[1:])
        with suppress(Unavailable):
            said = _run([*command, "--version"]).strip()
            own = GCC_FLAGS if "Free Software Foundation" in said else ()
            return Compiler(command, said.partition("\n")[0], own)
    return None


def no_compiler() -> str:
    """Say why `compiler()` is None."""
    if (asked := os.environ.get("CXX", "")).strip():
        return f"CXX={asked!r} is no C++ compiler that runs"
    return "there is no C++ compiler (c++, g++ or clang++; CXX may name another)"


def _run(command: Sequence[str]) -> str:
    """Return the output of a command.  Raises Unavailable if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{shlex.join(command)}\n{error}") from None
    if done.returncode:
        raise Unavailable(
            f"the compiler failed with exit status {done.returncode}:\n  {shlex.join(command)}\n{done.stdout[:SHOWN]}"
        )
    return done.stdout


# -- jobs


@dataclass(frozen=True)
class Job:
    """A library to be had.

    name     of its file, before the hash
    source   text; it finds the headers of optgen/runtime/cpu/cpp
    defines  preprocessor macros, "NAME=value"
    """

    name: str
    source: str
    defines: tuple[str, ...] = ()

    def flags(self, isa: Isa) -> list[str]:
        defines = [f"-D{define}" for define in (*self.defines, f"OPTGEN_L1={first_level_cache()}")]
        return [*FLAGS, *isa.flags, f"-I{HEADERS}", *defines]


Key = tuple[Job, Compiler, Isa]


@functools.cache
def _headers() -> str:
    """Hash of all headers."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(HEADERS.glob("*.h"))}
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _stamp(key: Key) -> bytes:
    """Hash of everything that shapes the library.  The folder of the headers does not: their text does."""
    job, by, isa = key
    flags = [flag for flag in (*job.flags(isa), *by.flags) if not flag.startswith("-I")]
    parts = [sys.platform, platform.machine(), isa.name, by.command, by.version, flags, _headers(), job.source]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


_known: dict[Key, ctypes.CDLL | Unavailable] = {}


def load(jobs: Sequence[Job]) -> list[ctypes.CDLL | Unavailable]:
    """Return the libraries of the jobs, in their order; Unavailable in the place of one that failed.

    What is not in the cache is compiled, several at a time.  Answers are kept, failures too.
    """
    by, best = compiler(), isa()
    if by is None:
        return [Unavailable(no_compiler())] * len(jobs)
    keys = [(job, by, best) for job in jobs]
    if new := list(dict.fromkeys(key for key in keys if key not in _known)):
        _known.update(zip(new, _obtain_all(new), strict=True))
    return [_known[key] for key in keys]


def _obtain_all(keys: Sequence[Key]) -> list[ctypes.CDLL | Unavailable]:
    kept = [_Kept(key, _stamp(key)) for key in keys]
    if missing := sum(not one.is_there() for one in kept):
        tell(f"compiling {missing} C++ {'kernel' if missing == 1 else 'kernels'}, kept in {cache.folder()}")
    with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool:
        return list(pool.map(_Kept.obtain, kept))


@dataclass(frozen=True)
class _Kept:
    """A library in a folder of the cache, beside the checksum of the library and of all that shaped it."""

    key: Key
    stamp: bytes

    @property
    def name(self) -> str:
        job, _, isa = self.key
        return f"{job.name}-{isa.name}-{self.stamp.hex()[:32]}"

    def is_there(self) -> bool:
        return cache.find(self.name, self.is_intact) is not None

    def obtain(self) -> ctypes.CDLL | Unavailable:
        """Return the library, compiled if it is not in the cache."""
        try:
            return ctypes.CDLL(str(self.library(cache.kept(self.name, self.make, self.is_intact))))
        except Unavailable as error:
            return error
        except OSError as error:  # no room, or a folder from which nothing may be run
            return Unavailable(f"{self.key[0].name} cannot be compiled: {error} (OPTGEN_CACHE names another folder)")

    def library(self, folder: Path) -> Path:
        return folder / f"{self.key[0].name}.so"

    def checksum(self, folder: Path) -> str:
        return hashlib.sha256(self.stamp + self.library(folder).read_bytes()).hexdigest()

    def is_intact(self, folder: Path) -> bool:
        """Return True if only we can write to the folder, and the library is what its name says, to the last bit."""
        try:
            written = (folder / "sha256").read_text(encoding="ascii")
            return cache.is_ours(folder.lstat()) and written == self.checksum(folder)
        except (OSError, ValueError):
            return False

    def make(self, folder: Path) -> None:
        """Compile the library.

        OpenMP's functions are first left to the runtime that torch has loaded: two runtimes would start their threads
        side by side.  Where there is none of that kind, its own is linked; at last, none.
        """
        job, by, isa = self.key
        source, made, library = folder / f"{job.name}.cpp", folder / f"{job.name}.o", self.library(folder)
        source.write_text(job.source, encoding="utf-8")
        shared = ["-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ())]
        problems: list[Unavailable] = []
        for openmp, link in ((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], [])):
            try:
                _run([*by.command, *job.flags(isa), *by.flags, *openmp, "-c", str(source), "-o", str(made)])
                _run([*by.command, *shared, str(made), *link, "-o", str(library)])
                ctypes.CDLL(str(library))
                made.unlink()
                (folder / "sha256").write_text(self.checksum(folder), encoding="ascii")
                return
            except Unavailable as error:
                problems.append(error)
            except OSError as error:
                problems.append(Unavailable(f"{job.name} was compiled but does not load: {error}"))
        raise problems[0]
