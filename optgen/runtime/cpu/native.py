"""C++ kernels: compiled at first use, kept in a folder of the user, loaded with ctypes.

A cached file is named after a hash of all that shaped it (source, headers, flags, compiler, instruction set) and ends
in a checksum of that hash and of its content.  It is checked before the file is opened as a library, because a
truncated one would end the process at its first page fault.  Files appear under their names complete or not at all, so
any number of processes may share the folder; where it cannot be used, a kernel is compiled for this process alone.

Environment: OPTGEN_CACHE (the folder), CXX (the compiler), OPTGEN_ISA (the instruction set),
OPTGEN_COMPILE_TIMEOUT (seconds).
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
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from optgen.runtime.records.warn import tell, warn

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

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""The folder in which Linux says how large they are."""

TIMEOUT = 120.0
"""Seconds for one run of the compiler; a kernel takes about one."""

SHOWN = 4000
"""Characters of a compiler's message in an error: its first one is what the others follow from."""


class Unavailable(RuntimeError):
    """A kernel cannot be had; the text says why, with the compiler's own message where there is one."""


class TimedOut(Unavailable):
    """The compiler ran for too long."""


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
    """Bytes of a core's first-level data cache; 32 KiB where the system does not say (anything but Linux).

    Kernels keep values of a tile in it (`elements_of_tile` in optgen.h); docs/cpu.md says what that saves.
    """
    for index in sorted(CACHES.glob("index*")):
        with suppress(OSError, ValueError):
            said = [(index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")]
            if said[:2] == ["1", "Data"] and said[2].endswith("K"):
                return int(said[2][:-1]) << 10
    return 32 << 10


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


def _timeout() -> float:
    asked = os.environ.get("OPTGEN_COMPILE_TIMEOUT", "")
    try:
        return float(asked) if asked else TIMEOUT
    except ValueError:
        raise ValueError(f"OPTGEN_COMPILE_TIMEOUT must be a number of seconds, got {asked!r}") from None


def _run(command: Sequence[str]) -> str:
    """Return the output of a command.  Raises Unavailable if it fails, TimedOut if it takes too long.

    It leads a group of processes of its own, which ends with it.
    """
    limit = _timeout()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            start_new_session=True, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{shlex.join(command)}\n{error}") from None
    with process:
        try:
            said = process.communicate(timeout=limit)[0]
        except BaseException as error:  # or interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise TimedOut(
                f"the compiler ran for more than {limit:g} s and was ended (OPTGEN_COMPILE_TIMEOUT sets the limit):\n"
                f"  {shlex.join(command)}"
            ) from None
    if process.returncode:
        raise Unavailable(
            f"the compiler failed with exit status {process.returncode}:\n  {shlex.join(command)}\n{said[:SHOWN]}"
        )
    return said


# -- the folder


def cache_folder() -> Path:
    """$OPTGEN_CACHE, else $XDG_CACHE_HOME/optgen, else ~/.cache/optgen; it may not exist."""
    asked = os.environ.get("OPTGEN_CACHE", "")
    if asked:
        return Path(asked).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "optgen"


def is_ours(status: os.stat_result) -> bool:
    """Return True if only the current user can write the file."""
    if sys.platform == "win32":
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def usable_folder() -> Path | None:
    """The cache folder, of code too, made where it is missing; None, with one warning, where it is not ours alone."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours(folder.stat()):
            return folder
        _warn_cache(f"{folder} belongs to or can be written by other users (chmod go-w, or set OPTGEN_CACHE)")
    except OSError as error:
        _warn_cache(f"{folder} cannot be used ({error.strerror or error})")
    return None


@functools.cache
def _warn_cache(reason: str) -> None:
    warn(f"optgen compiles its kernels anew in every process: {reason}")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process make a file while the others wait for it, at most as long as a compiler may run.

    The lock ends with the process that holds it.  It saves work only: where it cannot be had, all go on.
    """
    lock = Path(f"{path}.lock")
    with ExitStack() as held:
        with suppress(ImportError, OSError):  # a folder or a system without locks
            import fcntl

            file = held.enter_context(open(lock, "w"))
            held.callback(lock.unlink, missing_ok=True)
            end = time.monotonic() + _timeout()
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield


def _publish(made: Path, path: Path, stamp: bytes) -> None:
    """Put the library and its checksum under `path`, at once.  Raises OSError if the folder takes no files."""
    content = made.read_bytes()
    handle, name = tempfile.mkstemp(prefix=".optgen-new-", dir=path.parent)  # 0600
    try:
        with open(handle, "wb") as file:
            file.write(content + hashlib.sha256(stamp + content).digest())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _intact(path: Path, stamp: bytes) -> bool:
    """Return True if `path` is a file that only we can write and that holds what its name says, to the last bit."""
    try:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) and is_ours(status) else b""
    except OSError:
        return False
    return content[-32:] == hashlib.sha256(stamp + content[:-32]).digest()


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
_refused: list[str] = []
"""Reasons why the cache folder took no library, to be warned of by the thread that has a line of the user's."""


def load(jobs: Sequence[Job]) -> list[ctypes.CDLL | Unavailable]:
    """Return the libraries of the jobs, in their order; Unavailable in the place of one that failed.

    What is not in the cache folder is compiled, several at a time.  Answers are kept, failures too.
    """
    by, best = compiler(), isa()
    if by is None:
        return [Unavailable(no_compiler())] * len(jobs)
    keys = [(job, by, best) for job in jobs]
    if new := list(dict.fromkeys(key for key in keys if key not in _known)):
        _known.update(zip(new, _obtain_all(new), strict=True))
    return [_known[key] for key in keys]


def _obtain_all(keys: Sequence[Key]) -> list[ctypes.CDLL | Unavailable]:
    folder, stamps = usable_folder(), list(map(_stamp, keys))
    names = [f"{job.name}-{isa.name}-{stamp.hex()[:32]}.so" for (job, _, isa), stamp in zip(keys, stamps, strict=True)]
    paths = [folder and folder / name for name in names]
    if missing := sum(path is None or not path.exists() for path in paths):
        where = f", kept in {folder}" if folder else ""
        tell(f"compiling {missing} C++ {'kernel' if missing == 1 else 'kernels'}{where}")
    with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool:
        found = list(pool.map(_obtain, keys, stamps, paths))
    while _refused:
        _warn_cache(_refused.pop())
    return found


def _obtain(key: Key, stamp: bytes, path: Path | None) -> ctypes.CDLL | Unavailable:
    try:
        if path is None:
            return _build(key, None, stamp)
        if found := _cached(path, stamp):
            return found
        with alone(path):
            return _cached(path, stamp) or _build(key, path, stamp)
    except Unavailable as error:
        return error
    except OSError as error:  # no room for temporary files
        return Unavailable(f"{key[0].name} cannot be compiled: {error}")


def _cached(path: Path, stamp: bytes) -> ctypes.CDLL | None:
    if _intact(path, stamp):
        with suppress(OSError):  # another system library, a folder mounted noexec: compile anew
            return ctypes.CDLL(str(path))
    return None


def _build(key: Key, path: Path | None, stamp: bytes) -> ctypes.CDLL:
    """Compile in a folder of our own, load, and leave the library under `path`."""
    with tempfile.TemporaryDirectory(prefix="optgen-", ignore_cleanup_errors=True) as work:
        made, library = _compile(key, Path(work))
        if path is not None:
            try:
                _publish(made, path, stamp)
            except OSError as error:
                _refused.append(f"{path.parent} takes no files ({error.strerror or error})")
    return library  # mapped: it outlives its file


def _compile(key: Key, work: Path) -> tuple[Path, ctypes.CDLL]:
    """Return the file of the library, and the library.

    OpenMP's functions are first left to the runtime that torch has loaded: two runtimes would start their threads side
    by side.  Where there is none of that kind, its own is linked; at last, none.
    """
    job, by, isa = key
    source, made = work / f"{job.name}.cpp", work / f"{job.name}.o"
    source.write_text(job.source, encoding="utf-8")
    shared = ["-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ())]
    problems: list[Unavailable] = []
    for openmp, link in ((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], [])):
        library = work / f"{len(problems)}.so"  # a name that was opened is not opened again
        try:
            _run([*by.command, *job.flags(isa), *by.flags, *openmp, "-c", str(source), "-o", str(made)])
            _run([*by.command, *shared, str(made), *link, "-o", str(library)])
            return library, ctypes.CDLL(str(library))
        except TimedOut:
            raise
        except Unavailable as error:
            problems.append(error)
        except OSError as error:
            problems.append(Unavailable(f"{job.name} was compiled but does not load: {error}"))
    raise problems[0]
