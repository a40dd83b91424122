"""C++ kernels on the CPU: the choice of them, compiling, the cache and its faults."""

import ctypes
import errno
import logging
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optgen.runtime import Optimizer
from optgen.runtime.cpu import cache, cpu, native
from optgen.runtime.layout import plans
from optgen.runtime.records.warn import tell
from optgen.runtime.step import backends
from tests import training
from tests.training import bits, give, nadam, params_of

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "nadam_float32-float32"
SHAPES = [(3, 5), (7,), (), (0,), (64,), (2, 2, 3)]

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nadam()  # the folder below is for what it compiles
    return tmp_path_factory.mktemp("cache") / "kernels"


@pytest.fixture(autouse=True)
def clean(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded nothing yet, with a folder of this test file's own."""
    monkeypatch.setenv("OPTGEN_CACHE", str(shared))
    for name in ("OPTGEN_ISA", "OPTGEN_BACKEND", "CXX"):
        monkeypatch.delenv(name, raising=False)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_num_threads(1)  # as tests/conftest.py has it


def forget() -> None:
    native._known.clear()
    cache._warn.cache_clear()
    cache._temporary.cache_clear()
    native._compiler.cache_clear()
    backends._warn_slow.cache_clear()


def everything(opt: Optimizer) -> Any:
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["backend"]
    return bits([params_of(opt), saved])


def trained(backend: str = "cpp", steps: int = 3, **options: Any) -> Any:
    opt = nadam()(training.parameters(SHAPES), lr=options.pop("lr", 0.1), weight_decay=0.01, backend=backend, **options)
    training.train(opt, range(steps))
    return opt


def same_as_eager() -> None:
    assert everything(trained()) == everything(trained("reference"))


def first(opt: Any, ndim: int = 2) -> Any:
    """Return the first parameter of so many dimensions."""
    return next(p for p in opt.param_groups[0]["params"] if p.ndim == ndim)


def gradient_half(opt: Any) -> None:
    first(opt).grad_dtype = None
    first(opt).grad = first(opt).grad.bfloat16()


# -- choosing ---------------------------------------------------------------------------------------------------
def test_the_same_bits_as_the_reference() -> None:
    same_as_eager()
    opt = trained("auto")
    assert training.has_plan(opt)
    assert everything(opt) == everything(trained("reference"))


def test_what_the_backend_option_means(monkeypatch: pytest.MonkeyPatch) -> None:
    device, plan = torch.device("cpu"), plans.load(nadam(), "fp32")
    assert backends.choose("auto", device, plan) == "cpp"
    assert backends.choose("reference", device, plan) == "reference"
    assert backends.choose("auto", torch.device("meta"), plan) == "reference"
    with pytest.raises(RuntimeError, match="backend='cpp' does not run on cuda tensors"):
        backends.choose("cpp", torch.device("cuda"), plan)
    monkeypatch.setenv("OPTGEN_BACKEND", "reference")
    assert backends.choose("auto", device, plan) == "reference"
    assert backends.choose("cpp", device, plan) == "cpp"
    monkeypatch.setenv("OPTGEN_BACKEND", "c++")
    with pytest.raises(ValueError, match=r"OPTGEN_BACKEND must be one of auto, reference, triton, cpp, got 'c\+\+'"):
        backends.choose("auto", device, plan)
    monkeypatch.setattr(cpu, "has_kernels", lambda plan: False)
    with pytest.raises(RuntimeError, match="plan 'fp32' was built without C\\+\\+ kernels"):
        backends.choose("cpp", device, plan)
    monkeypatch.setenv("OPTGEN_BACKEND", "cpp")
    with pytest.raises(RuntimeError, match="plan 'fp32' was built without"):
        backends.choose("auto", device, plan)
    monkeypatch.delenv("OPTGEN_BACKEND")
    with pytest.warns(UserWarning, match="plan 'fp32' was built without C\\+\\+ kernels"):
        assert backends.choose("auto", device, plan) == "reference"


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.isa().needs <= native.cpu_flags()
    monkeypatch.setenv("OPTGEN_ISA", "portable")
    assert native.isa().name == "portable"
    same_as_eager()
    monkeypatch.setattr(native, "cpu_flags", lambda: native.ISAS[2].needs)
    monkeypatch.setenv("OPTGEN_ISA", "sse")
    with pytest.raises(ValueError, match="must be one of avx512vbmi, avx512, avx2, portable, got 'sse'"):
        native.isa()
    monkeypatch.setenv("OPTGEN_ISA", "avx512")
    opt = nadam()(training.parameters(SHAPES))
    give(params_of(opt), 0)
    with pytest.raises(RuntimeError, match="OPTGEN_ISA=avx512, but this CPU has no avx512bw"):
        opt.step()
    assert not opt.state
    monkeypatch.delenv("OPTGEN_ISA")
    assert native.isa().name == "avx2"


def test_the_size_of_the_first_level_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, kib in ((0, 32), (48 << 10, 48)):
        monkeypatch.setattr(os, "sysconf", lambda name, said=said: said)
        native.first_level_cache.cache_clear()
        assert f"-DOPTGEN_L1={kib << 10}" in native.Job("f", "").flags(native.isa()), said
    native.first_level_cache.cache_clear()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPTGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.place() == tmp_path / "optgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.place() == tmp_path / ".cache" / "optgen"
    trained()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache.place(), *cache.place().iterdir())} == {0o700}


# -- the compiler -------------------------------------------------------------------------------------------------
def script(path: Path, text: str, version: str = "some 1.0") -> str:
    """A compiler that answers --version and otherwise does what `text` says; `real` is a true one."""
    real = shlex.join(native.compiler().command)
    path.write_text(f'#!/bin/sh\nreal="{real}"\n[ "$1" = --version ] && echo "{version}" && exit 0\n{text}\n')
    path.chmod(0o755)
    return str(path)


def stops_untouched(match: str) -> None:
    """backend='cpp': RuntimeError, and no state was made; then backend='auto': one warning, and eager torch."""
    opt = nadam()(training.parameters(SHAPES), backend="cpp")
    give(params_of(opt), 0)
    before = bits(params_of(opt))
    with pytest.raises(RuntimeError, match=match):
        opt.step()
    assert not opt.state
    assert bits(params_of(opt)) == before
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
         r"exit status 3:\n  .*/bad -std=c\+\+17 .*\nline 7: the moon is in the wrong house"),
        ('for last; do :; done; echo "not a library" > "$last"', "was compiled but does not load"),
        ('exec $real "$@" -DOPTGEN_GRAD=sun', "'sun' was not declared"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_or_makes_garbage(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path / "bad", text))
    stops_untouched(said)
    assert not list((tmp_path / "cache").iterdir())


def wait_until(what: Callable[[], bool], limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_compilers_of_other_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flags that only GCC knows are given to GCC; one without OpenMP makes kernels of one thread."""
    text = 'case "$*" in *-fopenmp*) echo "unsupported option -fopenmp" >&2; exit 1;; esac; exec $real "$@"'
    plain = script(tmp_path / "plain", text, "clang version 19")
    gcc = script(tmp_path / "gcc", "", "g++ 1.0\nCopyright (C) 2022 Free Software Foundation, Inc.")
    for path, version, flags in ((gcc, "g++ 1.0", native.GCC_FLAGS), (plain, "clang version 19", ())):
        monkeypatch.setenv("CXX", path)
        assert (native.compiler().version, native.compiler().flags) == (version, flags)
    same_as_eager()


# -- the cache and its faults ---------------------------------------------------------------------------------------
@pytest.fixture
def folder(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which holds one kernel."""
    pristine, path = shared.parent / "pristine", tmp_path / "cache"
    monkeypatch.setenv("OPTGEN_CACHE", str(pristine))
    trained()
    shutil.copytree(pristine, path)
    monkeypatch.setenv("OPTGEN_CACHE", str(path))
    assert len(list(path.iterdir())) == 1
    forget()
    return path


def taken_out(folder: Path) -> Path:
    """Remove the kernel of a folder."""
    (path,) = folder.iterdir()
    shutil.rmtree(path)
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources compiled in the test, by name."""
    done: list[str] = []
    run = native._Kept.make
    monkeypatch.setattr(native._Kept, "make", lambda one, folder: done.append(one.key[0].name) or run(one, folder))
    return done


def test_a_kernel_is_compiled_once_and_told_before(
    folder: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = taken_out(folder)
    with caplog.at_level(logging.INFO, logger="optgen"):
        same_as_eager()
        forget()
        same_as_eager()  # from the folder: nothing is compiled
    assert [r.getMessage() for r in caplog.records if r.name == "optgen"] == [
        f"compiling 1 C++ kernel, kept in {folder}"
    ]
    assert compiled == [KERNEL]
    assert list(folder.iterdir()) == [path]


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


def test_what_is_in_the_name_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another source, instruction set, compiler or header: another file."""
    source = cpu.source
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setattr(cpu, "source", lambda *args: source(*args) + "\n// more\n"),
        lambda: monkeypatch.setenv("OPTGEN_ISA", "portable"),
        lambda: monkeypatch.setenv("CXX", script(tmp_path / "other", 'exec $real "$@"')),
        lambda: monkeypatch.setattr(native, "_headers", lambda: "others"),
    ]
    for k, change in enumerate(changes):
        change()
        forget()
        trained()
        assert len(list(folder.iterdir())) == k + 2


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "bit in the code": lambda content: content[:5000] + bytes([content[5000] ^ 4]) + content[5001:],
    "bytes added": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", [*DAMAGE, "no checksum", "renamed"])
def test_damaged_files_are_never_opened(
    damage: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = folder.iterdir()
    library = path / f"{KERNEL}.so"
    if damage == "no checksum":
        (path / "sha256").unlink()
    elif damage == "renamed":  # by hand: that of another instruction set
        monkeypatch.setenv("OPTGEN_ISA", "portable")
        trained()
        (other,) = set(folder.iterdir()) - {path}
        shutil.rmtree(other)
        path, library = path.rename(other), other / library.name
        compiled.clear()
        forget()
    else:
        library.write_bytes(DAMAGE[damage](library.read_bytes()))
    opened: list[str] = []
    true = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or true(name))
    same_as_eager()
    assert compiled == [KERNEL]
    assert opened[0] != str(library)
    forget()
    same_as_eager()  # it was written anew
    assert compiled == [KERNEL]
    assert opened[-1] == str(library)


@pytest.mark.parametrize("what", ["mode", "owner", "link", "file"])
def test_what_others_could_have_written(what: str, folder: Path, compiled: list[str]) -> None:
    (path,) = folder.iterdir()
    if what == "mode":
        path.chmod(0o777)
    elif what == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 12345, -1)
    elif what == "link":
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    else:
        shutil.rmtree(path)
        path.write_text("")
    if what in ("link", "file"):
        with pytest.warns(UserWarning, match="cannot be compiled: .*Not a directory"):
            trained("auto")
    else:
        same_as_eager()
        assert cache.is_ours(path.lstat())
    assert compiled == [KERNEL]


@pytest.mark.parametrize("what", ["0o777", "owner", "read-only", "file", "file/below"])
def test_a_cache_that_cannot_be_used(
    what: str, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels are kept for this process alone; one warning, at the line of the user's that makes the step."""
    said = "belongs to or can be written by other users"
    if what == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    elif what == "read-only":
        taken_out(folder)
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
        said = "takes no files"
    elif what.startswith("file"):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / what))
        said = "cannot be used"
    else:
        folder.chmod(int(what, 8))
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    with pytest.warns(UserWarning, match=f"compiles its kernels anew in every process: .*{said}") as caught:
        same_as_eager()
    assert [w.filename for w in caught] == [training.__file__]
    same_as_eager()  # no second warning, no second compilation
    assert compiled == [KERNEL]
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == before


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_no_room(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_out(folder)

    def fails(*args: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.tempfile, "mkdtemp", fails)
    stops_untouched(f"{KERNEL} cannot be compiled: .*{os.strerror(code)}.*OPTGEN_CACHE names another folder")
    assert not list(folder.iterdir())


def test_a_lock_whose_holder_died_is_not_waited_for(folder: Path) -> None:
    path = taken_out(folder)
    Path(f"{path}.lock").write_text("")
    trained()
    assert list(folder.iterdir()) == [path]


def start(text: str, **environment: str) -> subprocess.Popen[str]:
    """Another process of Python."""
    return subprocess.Popen(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


LOAD = """
from optgen.runtime.cpu import native
(made,) = native.load([native.Job("alone", 'extern "C" int seven() { return 7; }')])
print("fine" if not isinstance(made, Exception) else made)
"""


def test_two_processes_and_one_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    """The first dies in the middle; the two after it meet at an empty cache, and one of them compiles."""
    log, cache = tmp_path / "log", tmp_path / "cache"
    slow = script(tmp_path / "slow", f"echo $$ >> {log}; exec sleep 600")
    first = start(LOAD, OPTGEN_CACHE=str(cache), CXX=slow)
    wait_until(log.exists)
    first.kill()
    first.wait()
    first.stdout.close()
    for pid in map(int, log.read_text().split()):
        os.kill(pid, signal.SIGKILL)
    assert not list(cache.glob("*/*.so"))
    # The same command: what the first would have made and what it has locked is what these two want.
    count = f'case "$*" in *" -c "*/alone.cpp*) echo x >> {tmp_path}/compiled;; esac'
    script(tmp_path / "slow", f'{count}; sleep 0.2; exec $real "$@"')
    for process in [start(LOAD, OPTGEN_CACHE=str(cache), CXX=slow) for _ in range(2)]:
        out, _ = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "fine\n")
    assert (tmp_path / "compiled").read_text() == "x\n"
    assert [path.name for path in cache.glob("*/*.so")] == ["alone.so"]


def test_one_openmp_runtime_and_forks(shared: Path) -> None:
    """Two threads in torch's own runtime; a forked process makes its steps with one, and is not stuck."""
    text = """
import os, re, torch
from optgen.optim import SGD
from optgen.runtime.cpu import cpu
torch.set_num_threads(2)
params = [torch.nn.Parameter(torch.ones(70000)) for _ in range(2)]
opt = SGD(params, lr=0.1, plan="fp32", backend="cpp")
for p in params:
    p.grad = torch.ones(70000)
def step():
    opt.step()
    assert opt._stepper.plans.kept
    return cpu.threads(70000)
opt.step()
assert step() == 2
maps = open("/proc/self/maps").read()
assert len(set(re.findall(r"\\S+/lib(?:g|i)?omp\\S*", maps))) == 1, maps
child = os.fork()
os.write(1, f"{step()}\\n".encode())  # print may write in pieces
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    out, _ = (process := start(text, OPTGEN_CACHE=str(shared))).communicate(timeout=120)
    assert process.returncode == 0, out
    assert sorted(re.findall(r"^\d+$", out, re.M)) == ["1", "2"]  # Python 3.12 also warns of forks beside threads
