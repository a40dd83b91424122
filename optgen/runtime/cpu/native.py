"""C++ kernels: compiled at first use, kept in a folder of the user, loaded with ctypes.

A cached file is named after all that shaped it (source, headers, flags, compiler, instruction set) and ends in
a trailer: that stamp and a checksum.  Both are read before the file is opened as a library, because a truncated
one would end the process at its first page fault.  Files appear under their names complete or not at all, so any
number of processes may share the folder; where it cannot be used, a kernel is compiled for this process alone.

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
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optgen.runtime.records.warn import tell, warn

ABI = 2
"""Number of the agreement between kernels and the runtime: the exported functions and the table's columns."""

HEADERS = Path(__file__).resolve().parent / "cpp"

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fwrapv",
    "-fvisibility=hidden", "-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-parentheses",
)  # fmt: skip
"""Never -ffast-math: linked in, it flushes subnormals to zero in the whole process.  What is not warned of: the
compilers' own headers leave registers undefined on purpose, and shifts beside sums are meant as generated."""

GCC_FLAGS = ("-fschedule-insns", "-fsched-pressure", "--param=max-completely-peeled-insns=400")
"""Neighbours of a loop that was written out are interleaved, so that a processor finds more to do at a time: 6 % of
AdamW int8_split24 (Zen 5; tools/cpu_kernel.py), of some rules nothing, for 0.15 s to compile.  Loops of up to 400
instructions, not 200, are written out: another 4 % with AVX2.  Others do not know these flags."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""The folder in which Linux says how large they are."""

TIMEOUT = 120.0
"""Seconds for one run of the compiler; a kernel takes about one."""

SHOWN = 4000
"""Characters of a compiler's message in an error: its first one is what the others follow from."""

_MAGIC = b"optgen\x00\x01"
_TRAILER = 32 + 32 + len(_MAGIC)


class Unavailable(RuntimeError):
    """A kernel cannot be had; the text says why, with the compiler's own message where there is one."""


class TimedOut(Unavailable):
    """The compiler ran for too long."""


# -- what this machine has --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Isa:
    """An instruction set: the compiler's flags for it, and the names in /proc/cpuinfo that it needs."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mfma", "-mf16c")

ISAS = (
    Isa("avx512vbmi", (*_AVX512_FLAGS, "-mavx512vbmi"), _AVX512 | {"avx512vbmi"}),
    Isa("avx512", _AVX512_FLAGS, _AVX512),
    Isa("avx2", ("-mavx2", "-mfma", "-mf16c"), _AVX2),
    Isa("portable", (), frozenset()),
)
"""Best first."""


@functools.cache
def first_level_cache() -> int:
    """Bytes of a core's first-level data cache; 32 KiB where the system does not say (anything but Linux).

    Kernels keep values of a tile in it (`elements_of_tile` in optgen.h).  At the end of each loop over a tile a
    processor runs dry: AdamW int8_split24 keeps 16 B of an element from loop to loop, and tiles of 2048 instead of 1024
    elements save 5 % of its step in cache and 11 % beyond (Zen 5, 48 KiB; tools/cpu_kernel.py).  Tiles of 4096 no
    longer fit (14 and 33 % more), nor those of 2048 where 24 B are kept (Adan: 5 % more).
    """
    for index in sorted(CACHES.glob("index*")):
        with suppress(OSError, ValueError):
            said = [(index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size")]
            if said[:2] == ["1", "Data"] and said[2].endswith("K"):
                return int(said[2][:-1]) << 10
    return 32 << 10


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the part of `Isa.needs` that this CPU has, under a kernel that saves its registers."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split()) & ISAS[0].needs
    # No such file (macOS): torch asks the CPU itself.
    known = {"AVX2": _AVX2, "AVX512": _AVX512}
    return known.get(torch.backends.cpu.get_cpu_capability(), frozenset())


def isa() -> Isa:
    """The best instruction set of this CPU, or the one that OPTGEN_ISA names.

    Raises ValueError for an unknown name, RuntimeError for one that the CPU has not.
    """
    asked = os.environ.get("OPTGEN_ISA", "")
    if not asked:
        return next(isa for isa in ISAS if isa.needs <= cpu_flags())
    for one in ISAS:
        if one.name == asked:
            if not one.needs <= cpu_flags():
                missing = ", ".join(sorted(one.needs - cpu_flags()))
                raise RuntimeError(f"OPTGEN_ISA={asked}, but this CPU has no {missing}")
            return one
    raise ValueError(f"OPTGEN_ISA must be one of {', '.join(one.name for one in ISAS)}, got {asked!r}")


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
    asked = os.environ.get("CXX", "")
    if asked.strip():
        return f"CXX={asked!r} is no C++ compiler that runs"
    return "there is no C++ compiler (c++, g++ or clang++; CXX may name another)"


def _timeout() -> float:
    asked = os.environ.get("OPTGEN_COMPILE_TIMEOUT", "")
    try:
        return float(asked) if asked else TIMEOUT
    except ValueError:
        raise ValueError(f"OPTGEN_COMPILE_TIMEOUT must be a number of seconds, got {asked!r}") from None


_running: set[int] = set()
"""Compilers at work, by the number of their process group."""


def _run(command: Sequence[str]) -> str:
    """Output of a command, stdout and stderr; Unavailable where it fails, TimedOut where it takes too long.

    It leads a group of processes of its own, which ends with it.
    """
    limit = _timeout()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as error:
        raise Unavailable(f"{shlex.join(command)}\n{error}") from None
    said, late = b"", True
    _running.add(process.pid)
    try:
        said = process.communicate(timeout=limit)[0]
        late = False
    except subprocess.TimeoutExpired:
        pass
    finally:
        if late:  # or interrupted
            _end(process.pid)
            with suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=1)[0]
        _running.discard(process.pid)
        assert process.stdout is not None
        process.stdout.close()
    text = f"  {shlex.join(command)}\n{said.decode(errors='replace')[:SHOWN]}"
    if late:
        raise TimedOut(
            f"the compiler ran for more than {limit:g} s and was ended (OPTGEN_COMPILE_TIMEOUT sets the limit):\n{text}"
        )
    if process.returncode:
        raise Unavailable(f"the compiler failed with exit status {process.returncode}:\n{text}")
    return said.decode(errors="replace")


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


# -- the folder -------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """$OPTGEN_CACHE, else $XDG_CACHE_HOME/optgen, else ~/.cache/optgen; it may not exist."""
    asked = os.environ.get("OPTGEN_CACHE", "")
    if asked:
        return Path(asked).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache") / "optgen"


def _ours(status: os.stat_result) -> bool:
    """Return True if nobody else could have written it."""
    owned = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return owned and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def usable_folder() -> Path | None:
    """The cache folder, of code too, made where it is missing; None, with one warning, where it is not ours alone."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        _warn_cache(f"{folder} cannot be used ({error.strerror or error})")
        return None
    if not _ours(status):
        _warn_cache(f"{folder} belongs to or can be written by other users (chmod go-w, or set OPTGEN_CACHE)")
        return None
    return folder


@functools.cache
def _warn_cache(reason: str) -> None:
    warn(f"optgen compiles its kernels anew in every process: {reason}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait for its file, at most as long as a compiler may run.

    The lock ends with the process that holds it; it saves work only, so where it cannot be had, all go on.
    """
    lock = path.with_name(f"{path.name}.lock")
    handle = _locked(lock)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                lock.unlink()
            os.close(handle)


def _locked(lock: Path) -> int | None:
    """The open lock file, once it is ours or has been waited for long enough; None where there are no locks."""
    try:
        import fcntl

        handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):
        return None
    end = time.monotonic() + _timeout()
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            break
    return handle


def _publish(made: Path, path: Path, stamp: bytes) -> None:
    """The library and its trailer under `path`, at once; OSError where the folder takes no files."""
    content = made.read_bytes()
    content += stamp
    content += hashlib.sha256(content).digest() + _MAGIC
    handle, name = tempfile.mkstemp(prefix=".optgen-new-", dir=path.parent)  # 0600
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sweep(path.parent)


_LEFT = re.compile(r"\.optgen-new-\w+|.+-[0-9a-f]{32}\.so\.lock")
"""Names of what a killed process leaves: the folder may hold files of others."""


def _sweep(folder: Path) -> None:
    """Remove files that processes left which were killed while they wrote."""
    old = time.time() - 3600
    with suppress(OSError):
        for entry in os.scandir(folder):
            if _LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) and entry.stat().st_mtime < old:
                os.unlink(entry.path)


def _whole(path: Path, stamp: bytes) -> bool:
    """Return True if `path` is a file of ours that holds what its name says, to the last bit."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _ours(status):
            return False
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
    except OSError:
        return False
    finally:
        os.close(handle)
    body, trailer = content[:-_TRAILER], content[-_TRAILER:]
    digest = hashlib.sha256(body + trailer[:32]).digest()
    return bool(body) and trailer == stamp + digest + _MAGIC


# -- jobs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A library to be had.

    name     of its file, before the hash
    source   text; it finds the headers of optgen/runtime/cpu/cpp
    defines  preprocessor macros, "NAME=value"
    vector   whether it is compiled for the instruction set of this CPU, or for any
    """

    name: str
    source: str
    defines: tuple[str, ...] = ()
    vector: bool = True

    def flags(self, isa: Isa) -> list[str]:
        defines = [f"-D{define}" for define in (*self.defines, f"OPTGEN_L1={first_level_cache()}")]
        return [*FLAGS, *(isa.flags if self.vector else ()), f"-I{HEADERS}", *defines]


@functools.cache
def _headers() -> str:
    """Hash of all headers."""
    total = hashlib.sha256()
    for path in sorted(HEADERS.glob("*.h")):
        text = path.read_bytes()
        total.update(f"{path.name} {len(text)}\n".encode() + text)
    return total.hexdigest()


def _stamp(job: Job, by: Compiler, isa: Isa) -> bytes:
    """Hash of everything that shapes the library.  The folder of the headers does not: their text does."""
    flags = [flag for flag in (*job.flags(isa), *by.flags) if not flag.startswith("-I")]
    parts = [ABI, sys.platform, platform.machine(), isa.name, by.command, by.version, flags, _headers(), job.source]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


_untaken: list[str] = []
"""Reasons why the cache folder took no library, to be warned of."""

_lock = threading.Lock()
_known: dict[tuple[Job, Compiler, Isa], ctypes.CDLL | Unavailable] = {}


def load(jobs: Sequence[Job]) -> list[ctypes.CDLL | Unavailable]:
    """Return the libraries of the jobs, in their order; Unavailable in the place of one that failed.

    What is not in the cache folder is compiled, several at a time.  Answers are kept, failures too.
    """
    by, best = compiler(), isa()
    if by is None:
        return [Unavailable(no_compiler())] * len(jobs)
    keys = [(job, by, best) for job in jobs]
    new = list(dict.fromkeys(key for key in keys if key not in _known))
    folder = usable_folder() if new else None
    stamps = [_stamp(*key) for key in new]
    names = [f"{key[0].name}-{best.name}-{stamp.hex()[:32]}.so" for key, stamp in zip(new, stamps, strict=True)]
    paths = [None if folder is None else folder / name for name in names]
    missing = sum(path is None or not os.path.exists(path) for path in paths)
    if missing:
        where = "" if folder is None else f", kept in {folder}"
        tell(f"compiling {missing} C++ {'kernel' if missing == 1 else 'kernels'}{where}")
    if len(new) == 1:
        _known[new[0]] = _obtain(new[0], stamps[0], paths[0])
    elif new:
        with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
            try:
                made = list(pool.map(_obtain, new, stamps, paths))
            except BaseException:  # interrupted: do not wait for compilers
                pool.shutdown(wait=False, cancel_futures=True)
                for group in list(_running):
                    _end(group)
                raise
        with _lock:
            _known.update(zip(new, made, strict=True))
    while _untaken:  # a thread of the pool has no line of the user's to point at
        _warn_cache(_untaken.pop())
    return [_known[key] for key in keys]


def _obtain(key: tuple[Job, Compiler, Isa], stamp: bytes, path: Path | None) -> ctypes.CDLL | Unavailable:
    job, by, isa = key
    share_openmp()
    try:
        library = _cached(job, path, stamp)
        if library is None and path is None:
            return _build(job, by, isa, stamp, None)
        if library is None:
            assert path is not None
            with _alone(path):
                library = _cached(job, path, stamp) or _build(job, by, isa, stamp, path)
        return library
    except Unavailable as error:
        return error
    except OSError as error:  # no room for temporary files
        return Unavailable(f"{job.name} cannot be compiled: {error}")


def _cached(job: Job, path: Path | None, stamp: bytes) -> ctypes.CDLL | None:
    if path is not None and _whole(path, stamp):
        with suppress(OSError):  # another system library, a folder mounted noexec: compile anew
            return _open(job, path, stamp)
    return None


def _open(job: Job, path: Path, stamp: bytes) -> ctypes.CDLL:
    """OSError where it does not load, or where it is not what it is taken for."""
    library = ctypes.CDLL(str(path))
    said: Any = library.optgen_stamp
    said.restype, said.argtypes = ctypes.c_char_p, ()
    if said() != stamp.hex().encode():
        raise OSError(f"{path} is another library than its name says")
    return library


def _build(job: Job, by: Compiler, isa: Isa, stamp: bytes, path: Path | None) -> ctypes.CDLL:
    """Compile in a folder of our own, load, and leave the library under `path`."""
    with tempfile.TemporaryDirectory(prefix="optgen-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        made = _compile(job, by, isa, stamp, work)
        library = made[1]
        if path is not None:
            try:
                _publish(made[0], path, stamp)
            except OSError as error:
                _untaken.append(f"{path.parent} takes no files ({error.strerror or error})")
    return library  # mapped: it outlives its file


def _compile(job: Job, by: Compiler, isa: Isa, stamp: bytes, work: Path) -> tuple[Path, ctypes.CDLL]:
    """(path, library).  OpenMP's functions are first left to the runtime that torch has loaded: two runtimes would
    start their threads side by side.  Where there is none of that kind, its own is linked; at last, none."""
    source, made = work / f"{job.name}.cpp", work / f"{job.name}.o"
    source.write_text(job.source, encoding="utf-8")
    flags = [*job.flags(isa), *by.flags, f'-DOPTGEN_STAMP="{stamp.hex()}"']
    problem: Exception | None = None
    for attempt, (openmp, link) in enumerate(((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], []))):
        library = work / f"{attempt}.so"  # a name that was opened is not opened again
        try:
            if attempt != 1:
                _run([*by.command, *flags, *openmp, "-c", str(source), "-o", str(made)])
            shared = ["-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ())]
            _run([*by.command, *shared, str(made), *link, "-o", str(library)])
            return library, _open(job, library, stamp)
        except TimedOut:
            raise
        except Unavailable as error:
            problem = problem or error
        except OSError as error:
            problem = problem or Unavailable(f"{job.name} was compiled but does not load: {error}")
    assert problem is not None
    raise problem


# -- OpenMP ------------------------------------------------------------------------------------------------


@functools.cache
def share_openmp() -> str | None:
    """Make torch's OpenMP runtime visible to our libraries. Return its file, or None if torch has loaded none.

    torch's wheels open theirs for all; a build that keeps it to itself has it opened again.
    """
    found = next((path for path in mapped_openmp()), None)
    try:
        ctypes.CDLL(None).GOMP_parallel  # noqa: B018
    except (AttributeError, TypeError, OSError):
        if found is not None:
            with suppress(OSError):
                ctypes.CDLL(found, mode=ctypes.RTLD_GLOBAL)
    return found


def mapped_openmp() -> list[str]:
    """The OpenMP runtimes that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*") if path.is_file()]
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return [path for path in paths if os.path.basename(path).startswith(("libgomp", "libomp", "libiomp"))]


# -- for people --------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Describe the compiler of kernels, and the folder in which they are kept.

    compiler, version    None where there is none
    isa                  "avx512vbmi", "avx512", "avx2" or "portable"
    cache, kernels       the folder, and how many compiled kernels it holds
    private              False if other users can write to the folder, which is then not used
    writable             whether this process may add to it
    openmp               torch's OpenMP runtime, None where it has none
    problem              why no kernel can be compiled, None where one can
    """
    by = compiler()
    problem = None if by is not None else no_compiler()
    try:
        name = isa().name
    except (RuntimeError, ValueError) as error:
        name, problem = "none", str(error)
    folder = cache_folder()
    present = next((place for place in (folder, *folder.parents) if place.exists()), None)
    writable = present is not None and present.is_dir() and os.access(present, os.W_OK)
    private = present != folder or sys.platform == "win32" or _ours(folder.stat())
    return {
        "compiler": shlex.join(by.command) if by else None,
        "version": by.version if by else None,
        "isa": name,
        "cache": str(folder),
        "kernels": len(list(folder.glob("*.so"))) if folder.is_dir() else 0,
        "private": private,
        "writable": writable and private,
        "openmp": share_openmp(),
        "problem": problem,
    }
