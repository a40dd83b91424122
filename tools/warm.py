"""Kernels of a run of tools/gpu_check.py, compiled before it: on the GPU's machine in several processes, or anywhere
without one, into a folder that Triton takes as its cache and into an archive of it.

Without a GPU, kernels are compiled for compute capability 9.0, or that of OPTGEN_EMULATE, and nothing is executed.
Triton takes what was compiled by the same version of Triton for the same source; other files are of no harm.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tools.bench import race

TIMED: tuple[race.Shapes, ...] = ([(4096, 4096)], [(768, 2304), (50257, 768), (2304,)], [(4096,), (64,)])
"""Lists of tensors whose steps have the kernels of the lists that are timed."""

GROUP = "__grp__"
"""The beginning of the name of that file in Triton's cache which lists the files of a kernel, by their whole paths."""


def environment(folder: Path) -> dict[str, str]:
    """Return what has to be set where the folder is written, and where it is read."""
    return {"TRITON_CACHE_DIR": str(folder.resolve()), "TRITON_DISABLE_LINE_INFO": "1"}


def compile_for(name: str, device: str = "cuda") -> None:
    """Step a contender of the benchmarks on tensors as those that are timed, twice: the first step makes the states."""
    contender = next(c for c in race.generated("triton") if c.name == name)
    for shapes in [[(512, 384)]] if contender.again is None else TIMED:
        optimizer = contender.build([torch.zeros(s, dtype=contender.dtype, device=device) for s in shapes])
        optimizer.step()
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()


def compile_check(text: str) -> None:
    """Launch what the checks of a cell launch, or those of CUDA graphs (a name and a plan)."""
    from tests import test_cuda as t

    class Report:
        broken, worst = (), {}

    cpu, nothing = torch.device("cpu"), lambda *given, **named: None
    patched = dict.fromkeys(("enclose", "oracle", "reading"), nothing)
    with mock.patch.multiple(t, differences=lambda *_: [], compare=lambda *_: Report, **patched):
        if text.startswith("graph "):
            _, name, plan = text.split()
            for host in (False, True):
                t.replayed_differences(name, plan, True, cpu, host=host, shapes=t.GRAPHED)
            return
        cell = next(c for c in t.cells() if str(c) == text)
        with mock.patch.object(t, "CHECKED", t.SHAPES):
            if cell.spec not in t.product.OF_MATRICES:
                t.test_fast_kernels_keep_to_their_enclosures(cell)
        if cell in t.strict_cells():
            triton = t.Side(cell, [torch.randn(s) for s in t.SHAPES], "triton", cpu, t.strict_class(cell))
            for step in range(2):
                triton.step(t.gradients(t.SHAPES, t.drawn(cell), getattr(torch, cell.param), step))


def _begin(capability: int) -> None:
    """Make this process one that compiles for a GPU and executes nothing."""
    race.end_with_parent()
    torch.set_num_threads(1)
    from tests.ptx import driver, emulator

    driver.install(capability)
    emulator.Kernel = SimpleNamespace
    driver.emulator = SimpleNamespace(Kernel=lambda ptx: SimpleNamespace(run=lambda *given, **named: None))


def fill(folder: Path, kernels: list[str], jobs: int, say: Callable[[str], None]) -> int:
    """Compile what timings and the checks of common rules launch, or the checks of `kernels`; write the archive.

    Return the exit code. What a run that was stopped has compiled is not compiled again.
    """
    os.environ |= {"OPTGEN_TEST_DEVICE": "cpu", "OPTGEN_BACKEND": "reference", "OPTGEN_TEST_KERNELS": " ".join(kernels)}
    os.environ.pop("TRITON_INTERPRET", None)
    capability = int(os.environ.setdefault("OPTGEN_EMULATE", "90"))
    from tests import test_cuda as t

    common = [c for c in t.cells() if kernels or (c.spec in t.FIRST and not c.flags and c.param != "float16")]
    work: list[tuple[Any, tuple[str, ...]]] = [(compile_check, (str(c),)) for c in common]
    if not kernels:
        work += [(compile_for, (c.name, "cpu")) for c in race.generated("triton")]
        work += [(compile_check, (f"graph {name} {plan}",)) for name, plan in t.GRAPHS]
    failed, context = 0, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or race.cores(), context, _begin, (capability,)) as pool:
        asked = {pool.submit(function, *given): given[0] for function, given in work}
        for n, done in enumerate(as_completed(asked)):
            error = done.exception()
            failed += error is not None
            say(f"{n + 1} of {len(asked)}: {asked[done]}" + (f": {race.in_words(error)}" if error else ""))
    archive = pack(folder)
    say(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, cache key {key()}, compute capability {capability / 10}")
    return 1 if failed else 0


def key() -> str:
    """Return the start of the key under which this Triton keeps kernels."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()[:16]


def archive_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tar.xz")


def pack(folder: Path) -> Path:
    """Write an archive of the kernels beside the folder: machine code and what a launch needs, without other texts."""
    archive = archive_of(folder)
    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(folder.glob("*/*")):
            if path.suffix not in (".json", ".cubin"):
                continue
            content = path.read_bytes()
            if path.name.startswith(GROUP):
                kept = [name for name in json.loads(content)["child_paths"] if name.endswith((".json", ".cubin"))]
                content = json.dumps({"child_paths": {name: name for name in kept}}).encode()
            info = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return archive


def unpack(folder: Path) -> int:
    """Write the kernels of the archive into the folder, under the paths that they have here; return their number."""
    count = 0
    with tarfile.open(archive_of(folder)) as tar:
        for info in tar:
            target, file = folder / info.name, tar.extractfile(info)
            if file is None or Path(info.name).parent.name != str(Path(info.name).parent):  # a folder of a kernel
                continue
            content = file.read()
            if target.name.startswith(GROUP):
                names = json.loads(content)["child_paths"]
                content = json.dumps({"child_paths": {n: str(target.parent.resolve() / n) for n in names}}).encode()
                count += 1
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    return count
