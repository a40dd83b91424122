"""C++ kernels on the CPU: compiling, the cache and its faults, the short way through a step, memory of the states."""

import copy
import ctypes
import errno
import gc
import io
import logging
import mmap
import os
import pickle
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from optgen.runtime import Field, Flag, Hyper, Optimizer, Variant
from optgen.runtime.cpu import cpu, native
from optgen.runtime.layout import plans
from optgen.runtime.records import Rule, Stage, arena
from optgen.runtime.records.arena import Arena
from optgen.runtime.records.join import Pair, Reference
from optgen.runtime.records.warn import tell
from optgen.runtime.step import backends, fast_path
from optgen.runtime.work.bucket import Bucket

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler on this machine"),
    pytest.mark.usefixtures("optimized"),
]


# -- a plan by hand: momentum with a decaying sum on the host ---------------------------------------------------
KERNELS = r"""
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#endif
namespace {
struct float32 { typedef float type; static float read(float x) { return x; } };
struct bfloat16 {
    typedef uint16_t type;
    static float read(uint16_t x) { union { uint32_t i; float f; } u; u.i = (uint32_t)x << 16; return u.f; }
};
template <class G> struct kernel {
    static void step(const int64_t *row, const float *s, int64_t low, int64_t high) {
        float *p = (float *)row[0], *m = (float *)row[2];
        const typename G::type *g = (const typename G::type *)row[1];
        for (int64_t i = low; i < high; i++) {
            m[i] = s[1] * m[i] + s[2] * G::read(g[i]);
            p[i] = p[i] - s[0] * m[i];
        }
    }
};
}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char *optgen_stamp() { return OPTGEN_STAMP; }
EXPORT const int32_t *optgen_layout() {
    static const int32_t out[] = {3, 1, 3, 4, 0, sizeof(OPTGEN_GRAD::type), 0, 4, 0};
    return out;
}
EXPORT int32_t optgen_step(const int64_t *table, int64_t tensors, const float *scalars, int32_t key, int32_t threads) {
    (void)key;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < tensors; k++)
        OPTGEN_KERNEL<OPTGEN_GRAD>::step(table + k * 9, scalars, 0, table[k * 9 + 3]);  // 3 addresses, 6 sizes
    return 0;
}
"""


def host(step: int, sign: float, *, lr: float, beta: float, total: float) -> tuple[float, ...]:
    total = beta * total + step
    return lr / total, beta, sign, total


def momentum(p: Tensor, g: Tensor, m: Tensor, rate: float, beta: float, sign: float, key: int, stream: int) -> None:
    m.copy_(m * beta + g.float() * sign)
    p.sub_(m * rate)


SWEEP = Stage("momentum", "elem", 0, (0, 1, 2), reads=("p", "g", "buffer"), stores=("p", "buffer"))


def pair(name: str = "tiny", text: str | None = KERNELS) -> Pair:
    variants = tuple(
        Variant(
            function="momentum",
            param="float32",
            fields=(Field("buffer", "float32"),),
            scalars=("rate", "beta", "sign"),
            host=host,
            flags={"strange": on},
            host_states=(("total", 0.0),),
            rule=Rule(({"strange": on},), ("rate", "beta", "sign"), host, stages=(SWEEP,)),
        )
        for on in (False, True)
    )
    made = Pair(name, variants, reference=lambda _: Reference(momentum, momentum, momentum))
    if text is not None:
        TEXTS[made] = text
    return made


TEXTS: weakref.WeakKeyDictionary[Pair, str] = weakref.WeakKeyDictionary()
"""The C++ kernels of pairs made here: they have no rule and no files."""


_has_kernels, _source = cpu.has_kernels, cpu.source


def has_kernels(plan: Pair) -> bool:
    return plan in TEXTS or _has_kernels(plan)


def source(plan: Pair, variant: Variant) -> str:
    return TEXTS[plan] if plan in TEXTS else _source(plan, variant)


TINY = {"tiny": pair(), "bare": pair("bare", None)}


class Momentum(Optimizer):
    SPEC = "momentum"
    HYPERS = (Hyper("lr", 0.1, ge=0.0), Hyper("beta", 0.5, ge=0.0, lt=1.0))
    FLAGS = (Flag("strange"),)
    PLANS = ()
    DEFAULT_PLAN = {"float32": "tiny"}

    def __init__(self, params: Any, lr: Any = 0.1, beta: float = 0.5, **options: Any) -> None:
        super().__init__(params, dict(lr=lr, beta=beta, strange=False, maximize=False), **options)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "kernels"


@pytest.fixture(autouse=True)
def clean(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded nothing yet, with a folder of this test file's own."""
    monkeypatch.setenv("OPTGEN_CACHE", str(shared))
    for name in ("OPTGEN_ISA", "OPTGEN_BACKEND", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plans, "provider", lambda cls, name: TINY[name])
    monkeypatch.setattr(cpu, "has_kernels", has_kernels)
    monkeypatch.setattr(cpu, "source", source)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_num_threads(1)  # as tests/conftest.py has it


def forget() -> None:
    native._known.clear()
    native._warn_cache.cache_clear()
    native._compiler.cache_clear()
    backends._warn_slow.cache_clear()


SHAPES = [(3, 5), (7,), (), (0,), (64,), (2, 2, 3)]


def parameters(seed: int = 0, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().flatten()
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else []
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value


def everything(opt: Optimizer) -> Any:
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["backend"]
    return bits([[list(g["params"]) for g in opt.param_groups], saved])


def trained(backend: str = "cpp", steps: int = 3, **options: Any) -> Momentum:
    params = parameters()
    opt = Momentum(params, backend=backend, **options)
    for step in range(steps):
        give(params, step)
        opt.step()
    return opt


def same_as_eager() -> None:
    assert everything(trained()) == everything(trained("reference"))


# -- choosing ---------------------------------------------------------------------------------------------------
def test_the_same_bits_as_the_reference() -> None:
    same_as_eager()
    opt = trained("auto")
    assert opt._stepper.fast_path.last is not None
    assert everything(opt) == everything(trained("reference"))


def test_what_the_backend_option_means(monkeypatch: pytest.MonkeyPatch) -> None:
    device, plan, bare = torch.device("cpu"), TINY["tiny"], TINY["bare"]
    assert backends.choose("auto", device, plan) == "cpp"
    backends._warn_slow.cache_clear()
    with pytest.warns(UserWarning, match="plan 'bare' was built without C\\+\\+ kernels"):
        assert backends.choose("auto", device, bare) == "reference"
    assert backends.choose("reference", device, plan) == "reference"
    assert backends.choose("auto", torch.device("meta"), plan) == "reference"
    with pytest.raises(RuntimeError, match="backend='cpp' does not run on cuda tensors"):
        backends.choose("cpp", torch.device("cuda"), plan)
    with pytest.raises(RuntimeError, match="plan 'bare' was built without C\\+\\+ kernels"):
        backends.choose("cpp", device, bare)
    monkeypatch.setenv("OPTGEN_BACKEND", "reference")
    assert backends.choose("auto", device, plan) == "reference"
    assert backends.choose("cpp", device, plan) == "cpp"
    monkeypatch.setenv("OPTGEN_BACKEND", "cpp")
    with pytest.raises(RuntimeError, match="plan 'bare' was built without"):
        backends.choose("auto", device, bare)
    monkeypatch.setenv("OPTGEN_BACKEND", "c++")
    with pytest.raises(ValueError, match=r"OPTGEN_BACKEND must be one of auto, reference, triton, cpp, got 'c\+\+'"):
        backends.choose("auto", device, plan)


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    best = native.isa()
    assert best.needs <= native.cpu_flags()
    monkeypatch.setenv("OPTGEN_ISA", "portable")
    assert native.isa().name == "portable"
    same_as_eager()
    monkeypatch.setattr(native, "cpu_flags", lambda: native.ISAS[2].needs)
    for name in ("avx512", "avx512vbmi"):
        monkeypatch.setenv("OPTGEN_ISA", name)
        with pytest.raises(RuntimeError, match=f"OPTGEN_ISA={name}, but this CPU has no avx512bw"):
            native.isa()
    monkeypatch.setenv("OPTGEN_ISA", "sse")
    with pytest.raises(ValueError, match="must be one of avx512vbmi, avx512, avx2, portable, got 'sse'"):
        native.isa()
    monkeypatch.delenv("OPTGEN_ISA")
    assert native.isa().name == "avx2"


def test_the_size_of_the_first_level_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "CACHES", tmp_path)
    for size, kib in (("", 32), ("32K", 32), ("48K", 48), ("128K", 128), ("1M", 32), ("K", 32)):
        for k, (kind, said) in enumerate((("Instruction", "64K"), ("Data", size))):
            folder = tmp_path / f"index{k}"
            folder.mkdir(exist_ok=True)
            for name, text in (("level", "1"), ("type", kind), ("size", said)):
                (folder / name).write_text(f"{text}\n")
        native.first_level_cache.cache_clear()
        assert native.first_level_cache() == kib << 10, size
        assert f"-DOPTGEN_L1={kib << 10}" in native.Job("f", "").flags(native.isa())
    shutil.rmtree(tmp_path / "index1")
    native.first_level_cache.cache_clear()
    assert native.first_level_cache() == 32 << 10
    native.first_level_cache.cache_clear()


def test_tiles_hold_what_the_first_level_cache_holds() -> None:
    expected = {  # KiB, elements of a block, kept arrays -> elements of a tile
        (32, 64, 4): 1024, (32, 64, 2): 2048, (48, 64, 4): 2048, (48, 64, 6): 1024, (48, 32, 4): 2048,
        (48, 16, 4): 2048, (48, 128, 6): 2048, (48, 256, 4): 4096, (128, 64, 6): 2048, (48, 64, 0): 2048,
    }  # fmt: skip
    for kib in {key[0] for key in expected}:
        lines = [
            f'static_assert(elements_of_tile({block}, {kept}) == {tile}, "");'
            for (size, block, kept), tile in expected.items()
            if size == kib
        ]
        source = '#include "optgen.h"\n' + "\n".join(lines)
        command = [*native.compiler().command, "-std=c++17", f"-I{native.HEADERS}", f"-DOPTGEN_L1={kib << 10}"]
        subprocess.run([*command, "-fsyntax-only", "-x", "c++", "-"], input=source, text=True, check=True)


def test_flags_that_only_gcc_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "g++ 1.0\nCopyright (C) 2022 Free Software Foundation, Inc."
    for name, text, flags in (("one", said, native.GCC_FLAGS), ("two", "clang version 19", ())):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        by = native.compiler()
        assert (by.version, by.flags) == (text.partition("\n")[0], flags)


def test_an_isa_that_the_cpu_has_not_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_flags", frozenset)
    monkeypatch.setenv("OPTGEN_ISA", "avx2")
    params = parameters()
    give(params, 0)
    opt = Momentum(params)
    with pytest.raises(RuntimeError, match="this CPU has no"):
        opt.step()
    assert not opt.state


def test_describe(shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    same_as_eager()
    found = native.describe()
    assert set(found) == {"compiler", "version", "isa", "cache", "kernels", "private", "writable", "openmp", "problem"}
    assert found["problem"] is None
    assert found["cache"] == str(shared)
    assert found["kernels"] >= 2
    assert found["writable"]
    assert found["isa"] == native.isa().name
    assert Path(shlex.split(found["compiler"])[0]).exists()
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = native.describe()
    assert (found["kernels"], found["compiler"], found["version"]) == (0, None, None)
    assert "no-such-compiler" in found["problem"]
    assert found["writable"]
    assert not (tmp_path / "a").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPTGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "optgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / ".cache" / "optgen"
    assert trained().state
    assert stat.S_IMODE(native.cache_folder().stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in native.cache_folder().iterdir()} == {0o600}


# -- the compiler -------------------------------------------------------------------------------------------------
def script(path: Path, text: str) -> str:
    """A compiler that answers --version and otherwise does what `text` says; `real` is a true one."""
    version = f'[ "$1" = --version ] && echo "{path.name} 1.0" && exit 0'
    path.write_text(f'#!/bin/sh\nreal="{shlex.join(native.compiler().command)}"\n{version}\n{text}\n')
    path.chmod(0o755)
    return str(path)


def stops_untouched(match: str) -> None:
    """backend='cpp': RuntimeError, and no state was made; then backend='auto': one warning, and eager torch."""
    params = parameters()
    give(params, 0)
    before = bits(list(params))
    opt = Momentum(params, backend="cpp")
    with pytest.raises(RuntimeError, match=match):
        opt.step()
    assert not opt.state
    assert bits(list(params)) == before
    with pytest.warns(UserWarning, match="steps in eager torch") as caught:
        automatic = trained("auto")
    assert len(caught) == 1
    assert everything(automatic) == everything(trained("reference"))
    trained("auto")  # warns no more


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    stops_untouched(r"backend='cpp', but there is no C\+\+ compiler \(c\+\+, g\+\+ or clang\+\+")
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    stops_untouched("CXX='/no/such/compiler -O1' is no C\\+\\+ compiler that runs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'line 7: the moon is in the wrong house' >&2; exit 3",
         r"exit status 3:\n  .*/bad -std=c\+\+17 -O3.*\nline 7: the moon is in the wrong house"),
        ('for last; do :; done; echo "not a library" > "$last"', "was compiled but does not load"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_or_makes_garbage(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "bad", text))
    stops_untouched(said)
    assert not list((tmp_path / "cache").glob("*.so*"))


def test_source_that_is_wrong_shows_the_compilers_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY, "tiny", pair(text=KERNELS.replace("s[0] * m[i]", "s[0] * sun[i]")))
    monkeypatch.setattr(plans, "_made", {})
    stops_untouched("'sun' was not declared")


def test_compiler_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTGEN_COMPILE_TIMEOUT", "0.3")
    pids = tmp_path / "pids"
    text = f"(sleep 600; echo late) & echo $! >> {pids}; echo $$ >> {pids}; sleep 600"
    monkeypatch.setenv("CXX", script(tmp_path / "slow", text))
    start = time.monotonic()
    stops_untouched(r"ran for more than 0.3 s and was ended \(OPTGEN_COMPILE_TIMEOUT")
    assert time.monotonic() - start < 300  # the script sleeps for 600
    # On a busy machine it may be ended before its first line.
    for pid in map(int, pids.read_text().split() if pids.exists() else ()):
        wait_until(lambda pid=pid: not alive(pid))  # type: ignore[misc]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what: Callable[[], bool], limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_compiler_without_openmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'case "$*" in *-fopenmp*) echo "unsupported option -fopenmp" >&2; exit 1;; esac; exec $real "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "plain", text))
    same_as_eager()


def test_time_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path))
    monkeypatch.setenv("OPTGEN_COMPILE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="OPTGEN_COMPILE_TIMEOUT must be a number of seconds, got 'soon'"):
        trained()


def test_several_kernels_are_compiled_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two kernels, each by a compiler that waits until both have started."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPTGEN_COMPILE_TIMEOUT", "100")
    wait = f'echo x >> {tmp_path}/started; while [ "$(wc -l < {tmp_path}/started)" -lt 2 ]; do sleep 0.01; done'
    monkeypatch.setenv("CXX", script(tmp_path / "waits", f'{wait}; exec $real "$@"'))
    params = parameters()
    give(params, 0)
    params[1].grad_dtype = None
    params[1].grad = torch.ones_like(params[1]).bfloat16()
    opt = Momentum(params, backend="cpp")
    opt.step()
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


# -- the cache and its faults ---------------------------------------------------------------------------------------
@pytest.fixture
def folder(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which holds the tiny kernel."""
    pristine, path = shared.parent / "pristine", tmp_path / "cache"
    monkeypatch.setenv("OPTGEN_CACHE", str(pristine))
    same_as_eager()
    shutil.copytree(pristine, path)
    monkeypatch.setenv("OPTGEN_CACHE", str(path))
    assert len(kernel_files(path)) == 1
    forget()
    return path


def kernel_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("momentum_*.so"))


def taken_out(folder: Path) -> Path:
    """Remove the kernel of a folder."""
    (path,) = kernel_files(folder)
    path.unlink()
    return path


def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources compiled from now on, by name."""
    done: list[str] = []
    run = native._compile
    monkeypatch.setattr(native, "_compile", lambda job, *rest: done.append(job.name) or run(job, *rest))
    return done


def test_a_kernel_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = compiles(monkeypatch)
    same_as_eager()
    assert done == []
    assert {path.suffix for path in folder.iterdir()} == {".so"}


def test_what_is_in_the_name_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another source, compiler, instruction set or header: another file."""
    before = kernel_files(folder)
    monkeypatch.setitem(TINY, "tiny", pair(text=KERNELS + "\n// more\n"))
    monkeypatch.setattr(plans, "_made", {})
    same_as_eager()
    assert len(kernel_files(folder)) == 2
    monkeypatch.setenv("OPTGEN_ISA", "portable")
    same_as_eager()
    assert len(kernel_files(folder)) == 3
    monkeypatch.setenv("CXX", script(tmp_path / "other", 'exec $real "$@"'))
    same_as_eager()
    assert len(kernel_files(folder)) == 4
    monkeypatch.setattr(native, "_headers", lambda: "others")
    forget()
    same_as_eager()
    assert len(kernel_files(folder)) == 5
    assert set(before) < set(kernel_files(folder))


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = position % len(content)
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "trailer cut off": lambda content: content[:-72],
    "last byte lost": lambda content: content[:-1],
    "bit in the code": flip(5000),
    "bit in the stamp": flip(-70),
    "bit in the checksum": flip(-20),
    "bytes added": lambda content: content + b"\0",
    "text": lambda content: b"hello" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_never_opened(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = kernel_files(folder)
    content = path.read_bytes()
    opened: list[Path] = []
    load = native._open
    monkeypatch.setattr(native, "_open", lambda job, path, stamp: opened.append(path) or load(job, path, stamp))
    path.write_bytes(DAMAGE[damage](content))
    done = compiles(monkeypatch)
    same_as_eager()
    assert done == ["momentum_float32-float32"]
    assert path not in opened
    assert native._whole(path, bytes.fromhex(path.stem.rpartition("-")[2]).ljust(32, b"\0")) is False
    forget()
    same_as_eager()  # it was written anew
    assert done == ["momentum_float32-float32"]
    assert path in opened


def test_a_file_for_another_instruction_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a home folder that two machines share, and a file renamed by hand."""
    (best,) = kernel_files(folder)
    monkeypatch.setenv("OPTGEN_ISA", "portable")
    same_as_eager()
    (portable,) = set(kernel_files(folder)) - {best}
    portable.write_bytes(best.read_bytes())
    forget()
    done = compiles(monkeypatch)
    same_as_eager()
    assert done == ["momentum_float32-float32"]
    assert portable.read_bytes() != best.read_bytes()


@pytest.mark.parametrize("what", ["mode", "owner", "link", "folder"])
def test_files_that_others_could_have_written(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = kernel_files(folder)
    if what == "mode":
        path.chmod(0o666)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 12345, -1)
    elif what == "link":
        path.rename(path.with_suffix(".elsewhere"))
        path.symlink_to(path.with_suffix(".elsewhere"))
    else:
        path.unlink()
        path.mkdir()
    done = compiles(monkeypatch)
    if what == "folder":
        with pytest.warns(UserWarning, match="compiles its kernels anew in every process: .* takes no files"):
            same_as_eager()
    else:
        same_as_eager()
        assert path.is_file()
        assert not path.is_symlink()
        assert native._ours(path.stat())
    assert done == ["momentum_float32-float32"]


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write(mode: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(mode)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    done = compiles(monkeypatch)
    with pytest.warns(UserWarning, match="can be written by other users") as caught:
        same_as_eager()
    assert len(caught) == 1
    assert "momentum_float32-float32" in done
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    found = native.describe()
    assert (found["problem"], found["private"], found["writable"]) == (None, False, False)
    same_as_eager()  # no second warning, no second compilation
    assert done.count("momentum_float32-float32") == 1


def test_a_folder_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    done = compiles(monkeypatch)
    with pytest.warns(UserWarning, match="belongs to"):
        same_as_eager()
    assert "momentum_float32-float32" in done


def test_what_is_compiled_is_told_before(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken_out(folder)
    with caplog.at_level(logging.INFO, logger="optgen"):
        same_as_eager()
        forget()
        same_as_eager()  # from the folder: nothing is compiled
    (said,) = {r.getMessage() for r in caplog.records if r.name == "optgen"}
    assert re.fullmatch(rf"compiling \d C\+\+ kernels?, kept in {folder}", said)


def test_it_is_told_on_a_terminal_unless_the_log_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("compiling")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tell("compiling")
    assert capsys.readouterr().err == "optgen: compiling\n"
    monkeypatch.setattr(logging.getLogger("optgen"), "level", logging.WARNING)
    tell("compiling")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("call", ["mkstemp", "write", "fsync", "replace"])
def test_a_folder_that_takes_no_files(
    call: str, code: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_out(folder)
    place = native.tempfile if call == "mkstemp" else os
    true = getattr(place, call)

    def fails(*args: Any, **options: Any) -> Any:
        if call == "write" and len(args[1]) < 4096:  # fault handlers and the like
            return true(*args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(place, call, fails)
    with pytest.warns(UserWarning, match=f"takes no files \\({os.strerror(code)}\\)") as caught:
        same_as_eager()
    assert [w.filename for w in caught] == [__file__]
    monkeypatch.undo()
    assert not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_out(folder)
    folder.chmod(0o500)
    with pytest.warns(UserWarning, match="takes no files"):
        same_as_eager()
    folder.chmod(0o700)


@pytest.mark.parametrize("where", ["file", "below a file"])
def test_a_folder_that_cannot_be_made(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "file" / ("x" if where != "file" else "")))
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        same_as_eager()
    assert len(caught) == 1


def test_no_room_for_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_out(folder)

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", full)
    stops_untouched("momentum_float32-float32 cannot be compiled: .*No space left on device")


def test_a_lock_whose_holder_lives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waited for, but not longer than a compiler may run."""
    import fcntl

    path = taken_out(folder)
    monkeypatch.setenv("OPTGEN_COMPILE_TIMEOUT", "1")

    begun: list[float] = []

    def compiled(command: Sequence[str], run: Callable[[Sequence[str]], str] = native._run) -> str:
        if "-c" in command:
            begun.append(time.monotonic())
        with pytest.MonkeyPatch.context() as free:  # a busy machine's compiler may run for longer than that
            free.delenv("OPTGEN_COMPILE_TIMEOUT", raising=False)
            return run(command)

    monkeypatch.setattr(native, "_run", compiled)
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    start = time.monotonic()
    trained()
    assert 1 <= begun[0] - start < native.TIMEOUT / 2
    os.close(lock)
    assert path.is_file()


def test_a_lock_whose_holder_died(folder: Path) -> None:
    path = taken_out(folder)
    lock = Path(f"{path}.lock")
    lock.write_text("")
    start = time.monotonic()
    trained()
    assert time.monotonic() - start < native.TIMEOUT
    assert path.is_file()
    assert not lock.exists()


def test_what_killed_processes_left_is_removed(folder: Path) -> None:
    taken_out(folder)
    old, new = folder / ".optgen-new-old", folder / ".optgen-new-new"
    foreign = folder / "poetry.lock"
    for left in (old, new, foreign):
        left.write_bytes(b"half a library")
    os.utime(old, (1, 1))
    os.utime(foreign, (1, 1))
    trained()
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()  # the folder is the user's to name


def test_a_kernel_for_other_tables_is_refused(folder: Path) -> None:
    """A plan that was generated again after its tables were imported: addresses would stand in the wrong columns."""
    plan = pair("another", KERNELS.replace("{3, 1, 3, 4, 0,", "{3, 1, 4, 4, 0,"))
    native_kernel = cpu.kernels([bucket_of(plan)])[0]
    assert isinstance(native_kernel, native.Unavailable)
    assert "generated again" in str(native_kernel)
    assert not isinstance(cpu.kernels([bucket_of(pair())])[0], native.Unavailable)


def bucket_of(plan: Pair) -> Bucket:
    variant = plan.variants[0]
    return Bucket(0, plan, variant, "cpp", torch.device("cpu"), torch.float32, 0, ())


def start(text: str, **environment: str) -> subprocess.Popen[str]:
    """Another process of Python, which finds optgen and this file."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


LOAD = """
from optgen.runtime.cpu import native
defines = "OPTGEN_KERNEL=kernel", "OPTGEN_GRAD=float32"
(made,) = native.load([native.Job("momentum_float32-float32", open(KERNELS).read(), defines)])
print("fine" if not isinstance(made, Exception) else made)
"""


def test_two_processes_and_one_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    """The first dies in the middle; the two after it meet at an empty cache, and one of them compiles."""
    log = tmp_path / "log"
    slow = script(tmp_path / "slow", f"echo $$ >> {log}; sleep 600")
    cache = str(tmp_path / "cache")
    (tmp_path / "kernels.cpp").write_text(KERNELS)
    load = LOAD.replace("KERNELS", repr(str(tmp_path / "kernels.cpp")))
    first = start(load, OPTGEN_CACHE=cache, CXX=slow)
    wait_until(log.exists)
    first.kill()
    first.wait()
    first.stdout.close()
    for pid in map(int, log.read_text().split()):
        os.killpg(pid, signal.SIGKILL)
    assert not list((tmp_path / "cache").glob("*.so"))
    # The same command: what the first would have made and what it has locked is what these two want.
    count = f'case "$*" in *" -c "*/momentum_float32-float32.cpp*) echo x >> {tmp_path}/compiled;; esac'
    script(tmp_path / "slow", f'{count}; sleep 0.2; exec $real "$@"')
    both = [start(load, OPTGEN_CACHE=cache, CXX=slow) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "fine\n")
    assert (tmp_path / "compiled").read_text() == "x\n"
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".so"}


def test_one_openmp_runtime_and_forks(shared: Path) -> None:
    """Two threads in torch's own runtime; a forked process makes its steps with one, and is not stuck."""
    text = """
import test_native, torch
from optgen.runtime.cpu import cpu, native
from optgen.runtime.layout import plans
torch.set_num_threads(2)
plans.provider = lambda cls, name: test_native.TINY[name]
cpu.has_kernels, cpu.source = test_native.has_kernels, test_native.source
assert len(native.mapped_openmp()) == 1, native.mapped_openmp()
import os
params = test_native.parameters(shapes=[(70000,), (70000,)])
opt = test_native.Momentum(params, backend="cpp")
for step in range(3):
    test_native.give(params, step)
    opt.step()
    assert len(native.mapped_openmp()) == 1, native.mapped_openmp()
assert opt._stepper.fast_path.last is not None and cpu.threads(70000) == 2
child = os.fork()
opt.step()
os.write(1, f"{opt._stepper.fast_path.last is not None} {cpu.threads(70000)}\\n".encode())  # print may write in pieces
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    process = start(text, OPTGEN_CACHE=str(shared))
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert sorted(out.split("\n")) == ["", "True 1", "True 2"]


# -- the short way ----------------------------------------------------------------------------------------------
def is_short(opt: Optimizer) -> bool:
    """Return True if the next step can go the short way, as far as the last one knows."""
    return opt._stepper.fast_path.last is not None


def first(opt: Momentum, ndim: int = 2) -> Any:
    """The first parameter of so many dimensions."""
    return next(p for p in opt.param_groups[0]["params"] if p.ndim == ndim)


def entry(opt: Momentum) -> dict[str, Any]:
    return opt.state[first(opt)]


def given(seed: int, shapes: Any) -> list[nn.Parameter]:
    """New parameters that have gradients."""
    new = parameters(seed, shapes)
    give(new, seed)
    return new


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def doubled(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v * 2 if isinstance(v, Tensor) else v for k, v in state.items()}


def fill_lr(opt: Momentum) -> None:
    value = opt.param_groups[0]["lr"]
    if isinstance(value, Tensor):
        value.fill_(0.9)
    else:
        opt.param_groups[0]["lr"] = torch.tensor(0.9)


def gradient_half(opt: Momentum) -> None:
    first(opt).grad_dtype = None
    first(opt).grad = first(opt).grad.bfloat16()


def gradient_negated(opt: Momentum) -> None:
    """A number that is stored with the other sign and says so."""
    p = first(opt, 0)
    p.grad = torch.tensor(complex(0, 1.5)).conj().imag
    assert p.grad.is_neg()
    assert p.grad.is_contiguous()


def another_parameter(opt: Momentum) -> None:
    old, params = first(opt), opt.param_groups[0]["params"]
    del opt.state[old]
    params[[p is old for p in params].index(True)] = given(5, [(3, 5)])[0]


def load(opt: Momentum) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for kept in saved["state"].values():
        kept["buffer"] *= 2
        kept.pop("note", None)  # of `extra_key`; loading refuses it
    opt.load_state_dict(saved)


CHANGES: dict[str, Callable[[Momentum], object]] = {
    "nothing": lambda opt: None,
    "lr": lambda opt: opt.param_groups[0].update(lr=0.7),
    "fill_lr": fill_lr,
    "set_data": lambda opt: setattr(first(opt), "data", first(opt).data * 2),
    "set_data_by_columns": lambda opt: setattr(first(opt), "data", by_columns(first(opt).data)),
    "no_gradient": lambda opt: setattr(first(opt), "grad", None),
    "columns": lambda opt: setattr(first(opt), "grad", by_columns(first(opt).grad)),
    "gradient_data": lambda opt: setattr(first(opt).grad, "data", first(opt).grad.data * 3),
    "gradient_half": gradient_half,
    "gradient_negated": gradient_negated,
    "reorder": lambda opt: opt.param_groups[0]["params"].reverse(),
    "another_parameter": another_parameter,
    "longer_list": lambda opt: opt.param_groups[0]["params"].extend(given(5, [(3, 5)])),
    "add_group": lambda opt: opt.add_param_group({"params": given(7, [(3, 4), (6,)]), "lr": 0.3}),
    "load": load,
    "clear_state": lambda opt: opt.state.clear(),
    "drop_one": lambda opt: opt.state.pop(first(opt)),
    "new_entry": lambda opt: opt.state.update({first(opt): doubled(entry(opt))}),
    "new_field": lambda opt: entry(opt).update(buffer=entry(opt)["buffer"] * 2),
    "new_field_data": lambda opt: setattr(entry(opt)["buffer"], "data", entry(opt)["buffer"].data * 2),
    "share_field": lambda opt: [kept["buffer"].share_memory_() for kept in opt.state.values()],  # moves their memory
    "set_step": lambda opt: entry(opt).update(step=40),
    "set_host_state": lambda opt: entry(opt).update(total=3.5),
    "extra_key": lambda opt: entry(opt).update(note="mine"),
    "flag": lambda opt: opt.param_groups[0].update(strange=True),
    "maximize": lambda opt: opt.param_groups[0].update(maximize=True),
    "extra_option": lambda opt: opt.param_groups[0].update(comment=1),
}
SHORT = {"nothing", "lr", "fill_lr", "gradient_data", "maximize", "load", "extra_key"}
"""Changes after which a step goes the short way at once; `load` starts with a long step, unasked."""


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_between_steps_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as eager torch; and where nothing is new to the kernels, the short way."""
    value = torch.tensor(0.1) if change == "fill_lr" else 0.1
    made = [trained(lr=copy.copy(value)), trained("reference", lr=copy.copy(value))]
    taken: list[bool] = []
    again = fast_path.CachedStep.run
    monkeypatch.setattr(fast_path.CachedStep, "run", lambda *args: taken.append(again(*args)) or taken[-1])
    assert is_short(made[0])
    for opt in made:
        CHANGES[change](opt)
        for step in range(6):
            opt.step()
            if change == "gradient_negated":
                gradient_negated(opt)
            elif step > 0:
                for g in opt.param_groups:
                    give(g["params"], step)
    assert everything(made[0]) == everything(made[1])
    assert taken[0] == (change in SHORT)
    if change not in ("set_data_by_columns", "gradient_negated"):  # what needs the long way at every step
        assert taken[-1]
        assert is_short(made[0])


@hypothesis.settings(max_examples=40)
@hypothesis.given(changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_changes_one_after_the_other(changes: list[str]) -> None:
    made = [trained(), trained("reference")]
    for opt in made:
        for step, change in enumerate(changes):
            CHANGES[change](opt)
            opt.step()
            if step % 3 < 2:
                opt.step()
            for g in opt.param_groups:
                give(g["params"], step)
        opt.step()
    assert everything(made[0]) == everything(made[1])


def test_a_parameter_that_takes_another_shape_is_refused() -> None:
    opt = trained()
    before = everything(opt)[1]
    p = opt.param_groups[0]["params"][4]  # the same memory, another shape: its state no longer fits
    p.data, p.grad = p.data.view(8, 8), p.grad.view(8, 8)
    with pytest.raises(RuntimeError, match=r"buffer: expected float32 \[8, 8\], got float32 \[64\]"):
        opt.step()
    assert everything(opt)[1] == before


def test_a_hyper_parameter_out_of_range_changes_nothing() -> None:
    opt = trained()
    before = everything(opt)
    for _ in range(2):
        opt.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match=r"lr must be >= 0, got -1.0"):
            opt.step()
        opt.param_groups[0]["lr"] = 0.1
        assert everything(opt) == before
    opt.step()
    assert is_short(opt)


def test_alternating_gradients_do_not_make_a_new_cached_step_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    cached = fast_path.CachedStep
    monkeypatch.setattr(fast_path, "CachedStep", lambda *args: made.append(1) or cached(*args))
    opt = Momentum(parameters(), backend="cpp")
    params = opt.param_groups[0]["params"]
    for step in range(100):
        give(params, step)
        params[step % 2].grad = None
        opt.step()
    assert len(made) < 12
    for _ in range(fast_path.PATIENCE + 2):
        opt.step()
    assert is_short(opt)


def test_versions_hooks_and_closures() -> None:
    opt = trained()
    p = first(opt)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        assert is_short(opt)
        version = p._version
        kept = p.grad
        assert opt.step(lambda: 2.5) == 2.5
        assert p._version == version + 1
        assert p.grad is kept
    assert calls == ["before", "after"] * 2
    for one in (opt, trained("reference")):
        loss = (first(one) ** 2).sum()
        one.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_steps_of_copies() -> None:
    opt = trained()
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert other._stepper.fast_path.last is None
        give(other.param_groups[0]["params"], 5)
        other.step()
        other.step()
        assert is_short(other)
    before = everything(opt)
    give(other.param_groups[0]["params"], 5)
    other.step()
    assert everything(opt) == before


def test_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at every step."""
    seen: list[int] = []
    count = cpu.threads
    monkeypatch.setattr(cpu, "threads", lambda elements: seen.append(count(elements)) or seen[-1])
    params = parameters(shapes=[(70000,)])
    opt = Momentum(params, backend="cpp")
    for threads in (1, 2, 2, 1, 3):
        give(params, 0)
        torch.set_num_threads(threads)
        opt.step()
    assert seen == [1, 2, 2, 1, 3]
    assert cpu.threads(cpu.SERIAL - 1) == 1


def test_nothing_is_kept_alive() -> None:
    opt = trained()
    opt.step()
    assert is_short(opt)
    p = first(opt)
    gradient, buffer = weakref.ref(p.grad), weakref.ref(opt.state[p]["buffer"])
    p.grad = None
    assert gradient() is None
    opt.state.clear()
    assert buffer() is None
    whole = weakref.ref(opt)
    del opt
    gc.collect()
    assert whole() is None


def test_step_counts_that_users_read() -> None:
    opt = trained(steps=300)  # beyond the numbers of which Python keeps one object each
    assert is_short(opt)
    assert {entry["step"] for entry in opt.state.values()} == {300}
    assert {type(entry["step"]) for entry in opt.state_dict()["state"].values()} == {int}
    assert everything(opt) == everything(trained("reference", steps=300))


# -- generated kernels ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_generated_kernels_the_short_way(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps of AdamW in 8 bits, small and large tensors in two groups: the bits of the long way."""
    from generated import AdamW

    monkeypatch.setattr(plans, "provider", None)
    made = []
    torch.set_num_threads(threads)
    for short in (True, False):
        params = [p.detach().bfloat16().requires_grad_() for p in parameters(3, [(3, 5), (80, 100), (), (70, 999)])]
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "seed": 3}]
        opt = AdamW(groups, lr=1e-2, backend="cpp")
        if not short:
            monkeypatch.setattr(opt._stepper.fast_path, "keep", lambda *_: None)
        for step in range(6):
            give(params, step)  # type: ignore[arg-type]
            opt.param_groups[0]["lr"] = 0.01 / (step + 1)
            opt.step()
        assert is_short(opt) == short
        made.append(everything(opt))
    assert made[0] == made[1]


def test_a_backend_that_changes_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from generated import AdamW

    monkeypatch.setattr(plans, "provider", None)
    params = parameters(shapes=[(3, 5)])
    opt = AdamW(params, lr=0.1, plan="fp32")
    for step, backend in enumerate(["cpp", "triton", "cpp", "cpp", "reference", "triton"], 1):
        opt.param_groups[0]["backend"] = backend
        before = params[0].detach().clone()
        params[0].grad = torch.ones(3, 5)
        opt.step()
        assert bool((params[0] < before - 0.05).all())
        assert opt.state[params[0]]["step"] == step
        assert not (is_short(opt) and backend == "reference")


# -- memory of the states -----------------------------------------------------------------------------------------
def test_arena_layout() -> None:
    sizes = [1 << 20, 300, (1 << 20) + 4, 100 << 10, 64, 3 << 20]
    room = Arena(sizes)
    tensors = [room.zeros((size // 4,), torch.float32) for size in sizes]
    starts = [t.data_ptr() for t in tensors]
    large = [s % arena.PAGE for s, size in zip(starts, sizes, strict=True) if size >= arena.LARGE]
    assert len(set(large)) == len(large)
    assert all(place % (2 * arena.SKEW) != 0 for place in large)
    assert all(start % 64 == 0 for start in starts)
    ends = [s + size for s, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] - starts[0] < sum(sizes) + 4 * 2 * arena.PAGE
    for t, size in zip(tensors, sizes, strict=True):
        assert t.untyped_storage().nbytes() == t.numel() * 4 == size // 4 * 4
        assert not t.any()
        assert t.is_contiguous()
        assert t._base is None
        t.fill_(1)
    assert all(bool((t == 1).all()) for t in tensors)
    over = room.zeros((1 << 20,), torch.float32)
    assert not over.any()
    assert not starts[0] <= over.data_ptr() < ends[-1]


@pytest.mark.parametrize("shape", [(), (3, 4), (0,), (2, 0, 3), (1,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float32, torch.bfloat16, torch.float16])
def test_arena_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    room = Arena([1 << 20, 4096])
    t = room.zeros(shape, dtype)
    assert (t.shape, t.dtype) == (torch.Size(shape), dtype)
    assert t.is_contiguous()
    t.fill_(3)
    assert bool((t == 3).all())


def test_small_arenas_and_machines_without_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Arena([100, 200])._map is None
    assert Arena([])._map is None

    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(mmap, "mmap", refused)
    room = Arena([1 << 20])
    assert room._map is None
    assert room.zeros((4,), torch.uint8).tolist() == [0] * 4
    monkeypatch.undo()
    monkeypatch.delattr(mmap, "MAP_ANONYMOUS")
    assert Arena([1 << 20])._map is None


def big() -> tuple[list[nn.Parameter], Momentum]:
    params = parameters(shapes=[(300, 1000), (5,), (200, 1000)])
    give(params, 0)
    opt = Momentum(params, backend="cpp")
    opt.step()
    return params, opt


def address(t: Tensor) -> int:
    return t.data_ptr()


def test_states_lie_in_one_mapping_and_are_tensors_like_others() -> None:
    params, opt = big()
    buffers = [opt.state[p]["buffer"] for p in params]
    places = sorted(map(address, buffers))
    assert places[-1] - places[0] < 500_000 * 4 + 5 * arena.PAGE
    for p, buffer in zip(params, buffers, strict=True):
        assert buffer.untyped_storage().nbytes() == p.numel() * 4
        assert torch.equal(buffer, p.grad)
        saved = io.BytesIO()
        torch.save(buffer, saved)
        assert len(saved.getvalue()) < p.numel() * 4 + 4096
        saved.seek(0)
        assert torch.equal(torch.load(saved), buffer)
        assert len(pickle.dumps(buffer)) < p.numel() * 4 + 4096
        other = copy.deepcopy(buffer)
        assert other.untyped_storage().nbytes() == p.numel() * 4
        other.zero_()
        assert buffer.any()
    assert opt.memory().states == {"buffer": 500_005 * 4}


def test_loaded_states_lie_in_one_mapping_too() -> None:
    params, opt = big()
    saved = opt.state_dict()
    before = everything(opt)
    opt.load_state_dict(saved)
    assert everything(opt) == before
    places = sorted(address(opt.state[p]["buffer"]) for p in params)
    assert places[-1] - places[0] < 500_000 * 4 + 5 * arena.PAGE
    assert {address(entry["buffer"]) for entry in saved["state"].values()}.isdisjoint(places)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_of_an_optimizer_is_freed_with_it() -> None:
    params = parameters(shapes=[(4000, 1000)])
    give(params, 0)
    opt = Momentum(params, backend="cpp")
    gc.collect()
    start = resident()
    opt.step()
    opt.step()
    with_states = resident()
    assert with_states - start > 15e6
    del opt
    gc.collect()
    assert resident() < with_states - 15e6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_states_are_private_to_a_process() -> None:
    params, opt = big()
    buffer = opt.state[params[0]]["buffer"]
    before = buffer.clone()
    child = os.fork()
    if not child:
        buffer.fill_(7)
        os._exit(0 if bool((buffer == 7).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(buffer, before)


def test_ctypes_calls_release_the_lock() -> None:
    """Kernels run without Python's lock."""
    trained()
    libraries = list(native._known.values())
    assert libraries
    assert all(isinstance(x, ctypes.CDLL) and not isinstance(x, ctypes.PyDLL) for x in libraries)
