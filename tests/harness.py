"""Builds one case's reference, Triton and C++ kernels from the compiler and runs them, without the runtime.

Triton runs in its interpreter: a test that imports this must run in a process with TRITON_INTERPRET=1
(tests/conftest.py sets it before triton is imported).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from optgen import _ready
from optgen.base import ready
from optgen.driver import compile as compiling
from optgen.driver import cpp_text, emit, load, plan_formats, record_text, targets, triton_text
from optgen.driver.project import Maths
from optgen.driver.targets import Case
from optgen.formats.masters import Native
from optgen.formats.plan import Plan
from optgen.lang.spec import Spec
from optgen.ops import dtypes
from optgen.runtime.cpu import cache, join, native
from optgen.runtime.layout import plans
from optgen.runtime.records import Field, Rule, Variant
from optgen.runtime.records import join as joins
from optgen.runtime.reference.eager import Blocks, rows_and_columns
from optgen.runtime.work import counting, eager
from optgen.runtime.work.bucket import Bucket

ROOT = Path(__file__).resolve().parents[1]


def python(
    code: str, *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> str:
    """Run code in a process of its own and return what it prints."""
    command = [sys.executable, "-c", textwrap.dedent(code), *words]
    done = subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    return done.stdout


def spec_of(name: str) -> Spec:
    return load.find_spec(name) if "(" in name else getattr(importlib.import_module(f"specs.{name}"), name)


def plan_of(name: str) -> Any:
    return getattr(importlib.import_module("specs.plans"), name)


def param_dtype(plan: str) -> torch.dtype:
    """Return the dtype of parameters that a plan is for: fp32 if it rounds bf16 weights to nearest."""
    return torch.float32 if plan_of(plan).master == Native() else torch.bfloat16


CORE = frozenset(
    "adafactor adafactorpaper adagrad adam adammini adamax adamp adamw adan ademamix adopt asgd came cautiousadamw "
    "lamb lion madgrad mars nadam novograd prodigy qhadam radam rmsprop rprop schedulefreeadamw sgd sinkgd sm3".split()
)
"""Rules that every test of all rules has every day: between them they have all that a rule can have."""


def daily(rule: str, test: str) -> bool:
    """Return True if a test of all rules has this one every day: each test has CORE and another sixth of the rest."""
    return rule.replace("_", "").lower() in CORE or zlib.crc32(f"{rule}:{test}".encode()) % 6 == 0


def sampled(test: str, params: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test of all rules; those that are not of every day are marked `full`.

    params  names of rules or classes, cells, or `pytest.param`s and tuples whose first value is one of them
    """
    made = []
    for one in params:
        values = getattr(one, "values", one if isinstance(one, tuple) else (one,))
        marks, name = list(getattr(one, "marks", ())), getattr(values[0], "spec", values[0])
        marks += [] if daily(name, test) else [pytest.mark.full]
        made.append(pytest.param(*values, marks=marks, id=getattr(one, "id", None)))
    return made


def case_of(
    spec: Spec, plan: Any, param: str, flags: Mapping[str, bool] | None = None, small: bool = False,
    vector: bool = False,
) -> Case:  # fmt: skip
    """The case of a dtype, of flags (others by default) and of a size class."""
    settings = {f.name: f.default for f in spec.flags} | dict(flags or {})
    recurrences = targets.recurrences_of(spec, tuple(sorted(settings.items())))
    dtype = dtypes.FROM_TORCH[param]
    storage = plan.storage(spec.present(settings), dtype, small, recurrences, vector=vector)
    return Case(settings, dtype, small, storage, vector)


def module(folder: Path, name: str, text: str, known: bool = False) -> ModuleType:
    """Return the module of a text, which is written to a folder."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return imported(path, name, known)


def imported(path: Path, name: str, known: bool = False) -> ModuleType:
    """Import a file, or the package whose `__init__.py` it is, under a name; `known` to sys.modules or not."""
    found = importlib.util.spec_from_file_location(name, path)
    assert found and found.loader
    made = importlib.util.module_from_spec(found)
    if known:
        sys.modules[name] = made
    found.loader.exec_module(made)
    return made


def package(folder: Path, name: str, rule: str, files: Mapping[str, str]) -> ModuleType:
    """Write the files of a generated folder of one rule, as a package, and import the rule's."""
    for file, text in {"__init__.py": "", **files}.items():
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_text(text, encoding="utf-8")
    imported(folder / name / "__init__.py", name, known=True)
    return importlib.import_module(f"{name}.{rule}")


def texts(test: str, pattern: str, plans: bool = True) -> list[Path]:
    """Return the generated files of that name, or pattern, of the rules that a test has every day, and of all plans."""
    parts = [(rule,) for rule in ready.classes().values() if daily(rule, test)]
    parts += [("plans", plan) for plan in ready.plans() if plans]
    return [file for at in parts for file in _ready.folder(*at).glob(pattern)]


@lru_cache(maxsize=256)
def loaded(spec: Spec, plan: Plan) -> joins.Pair:
    """A rule under a plan in strict maths, with what the eager reference needs."""
    folder = f"{plan_formats.PLANS}/{plan.name}"
    files = {
        f"{spec.name}/__init__.py": emit.emit_class(spec, (plan.name,), "strict"),
        f"{spec.name}/{triton_text.STRICT}": triton_text.tile_text(spec),
        f"{folder}/__init__.py": record_text.plan_text(plan, "strict"),
        f"{folder}/{triton_text.STRICT}": triton_text.codec_text(plan, "strict"),
    }
    files |= {f"{spec.name}/{plan.name}/{name}": text for name, text in emit.findings_files(spec, plan).items()}
    module = importlib.import_module(f"{compiling.import_package(spec.name, files).__name__}.{spec.name}")
    return plans.load(getattr(module, spec.class_name), plan.name)


def variant_of(spec: Spec, case: Case) -> Variant:
    """The strict records of a case."""
    name = targets.case_name(spec, case)
    return next(v for v in loaded(spec, case.storage.plan).variants if v.function == name)


def eager_step(
    spec: Spec, case: Case, tensors: Mapping[str, torch.Tensor], g: torch.Tensor, scalars: Sequence[float], key: int,
    stream: int,
) -> Iterator[Any]:  # fmt: skip
    """Return the step of a parameter; it yields what it adds to sums over the model."""
    pair, variant = loaded(spec, case.storage.plan), variant_of(spec, case)
    bucket = Bucket(pair, variant, "reference", g.device, g.dtype)
    bucket.lines.add(0, 0, 0, ())
    bucket.line_of.append(0)
    bucket.params, bucket.grads, bucket.shards, bucket.names = [tensors["p"]], [g], [None], ["p"]
    bucket.states, bucket.streams = [dict(tensors)], [stream]
    return eager.runner(bucket, counting.HostScalars(array("f", scalars), array("i", [key]), [(0, 0)]))


class Pair:
    """The strict reference and the kernels of one case, in strict or fast maths, and a set of buffers for each."""

    def __init__(self, spec: Spec, case: Case, folder: Path, maths: Maths = "strict") -> None:
        self.spec, self.case, self.folder, self.maths = spec, case, folder, maths
        self.variant = variant_of(spec, case)

    @cached_property
    def triton(self) -> tuple[Variant, Any]:
        """The case's variant, and the Triton kernels of all cases of its plan."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        pair, kernels = triton_text.joined(self.spec, self.case.storage.plan, self.maths, partial(module, folder))
        return next(v for v in pair.variants if v.function == self.variant.function), kernels

    def buffers(self, shape: tuple[int, ...], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fresh state: what stores zero, and a weight."""
        rows, columns = rows_and_columns(torch.Size(shape))
        out = {"p": weight.to(getattr(torch, self.variant.param), copy=True)}
        for f in self.variant.fields:
            size = shape if f.per == 1 else (rows, -(-columns // f.per) * f.width)
            out[f.name] = torch.full(size, f.zero, dtype=f.torch_dtype)
        return out

    def ordered(self, buffers: Mapping[str, torch.Tensor], g: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in the order of a kernel's table."""
        return [buffers["p"], g, *(buffers[name] for name in self.variant.names)]

    def values(self, hypers: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters, and host states as they start, unless given."""
        return {h.name: h.default for h in self.spec.hypers} | dict(self.variant.host_states) | dict(hypers)

    def run_reference(
        self, buffers: dict[str, torch.Tensor], g: torch.Tensor, step: int, key: int, stream: int, **hypers: Any
    ) -> None:
        function, count = self.variant.host
        scalars = function(step, 1.0, **self.values(hypers))[:count]
        assert not list(eager_step(self.spec, self.case, buffers, g, scalars, key, stream))

    def differing(
        self, weights: Sequence[torch.Tensor], steps: Iterable[Sequence[torch.Tensor]], run: Callable[..., None],
        **hypers: Any,
    ) -> list[str]:  # fmt: skip
        """Train tensors along the gradients of some steps by the reference, and by `run_together` or `run_cpp`; name
        what these store with other bits after the first step that differs."""
        ours, theirs = ([self.buffers(w.shape, w) for w in weights] for _ in range(2))
        for step, grads in enumerate(steps, 1):
            key, found = 0x1234567 * step, []
            for k, (mine, g) in enumerate(zip(ours, grads, strict=True)):
                self.run_reference(mine, g, step, key, 99 + k, **hypers)
            items = [(other, g, 99 + k) for k, (other, g) in enumerate(zip(theirs, grads, strict=True))]
            run(items, step, key, **hypers)
            for w, mine, other in zip(weights, ours, theirs, strict=True):
                found += [f"{x} of {[*w.shape]} at {step}" for x in mine if not same_bits(mine[x], other[x])]
            if found:
                return found
        return []

    def run_triton(
        self, buffers: dict[str, torch.Tensor], g: torch.Tensor, step: int, key: int, stream: int, tiles: int = 4,
        **hypers: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel over one tensor."""
        self.run_together([(buffers, g, stream)], step, key, tiles, **hypers)

    def run_together(
        self, tensors: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor, int]], step: int, key: int, tiles: int = 4,
        **hypers: Any,
    ) -> None:  # fmt: skip
        """Launch the Triton kernel over several tensors (buffers, gradient, stream key), as few times as may be."""
        import triton.language as tl

        from optgen.runtime.gpu.compiled import launched

        variant, kernels = self.triton
        name, block = variant.function, variant.block
        size = kernels.TILE[name]
        numbers = [torch.tensor(x) for x in kernels.NUMBERS[name]]
        groups: dict[tuple[bool, bool], tuple[list[list[int]], list[list[int]]]] = {}
        for buffers, g, stream in tensors:
            ordered = self.ordered(buffers, g)
            rows, columns = rows_and_columns(g.shape)
            ragged = block > 1 and rows > 1 and columns % block != 0
            count = -(-rows * -(-columns // block) // (size // block)) if ragged else max(1, -(-g.numel() // size))
            aligned = all(t.data_ptr() % 16 == 0 for t in ordered)
            table, work = groups.setdefault((ragged, aligned), ([], []))
            work += [[len(table), first] for first in range(0, count, tiles)]
            table.append([t.data_ptr() for t in (*ordered, *numbers)] + [g.numel(), columns, stream, 0, 0, columns])
        grad = getattr(tl, str(tensors[0][1].dtype).removeprefix("torch."))
        made = variant.single.host(step, 1.0, **self.values(hypers))
        scalars = [made[k] for k in variant.single.stages[0].scalars]
        for (ragged, aligned), (table, work) in groups.items():
            how: dict[str, Any] = dict(grad=grad, tiles=tiles, tile=size, ragged=ragged, aligned=aligned)
            sweep = launched(kernels.CONSTANTS[name]["SWEEP"], **how)
            pointers, items = torch.tensor(table, dtype=torch.int64), torch.tensor(work, dtype=torch.int32)
            launch = getattr(kernels, name)[(len(work),)]
            launch(pointers, items, *scalars, key, SWEEP=sweep, num_warps=1, enable_fp_fusion=False)

    @cached_property
    def joined(self) -> tuple[Variant, Rule]:
        """The case's variant, and the rule of its C++ kernel, in the maths of the kernels."""
        made: dict[str, Any] = {}
        exec(compile(record_text.rule_text(self.spec, self.maths), "records", "exec"), made)
        plan = record_text.plan_record(self.case.storage.plan)
        variants = joins.with_steps(made["RULES"], made["STEPS"], plan)
        variant = next(v for v in variants if v.function == self.variant.function)
        return variant, variant.single

    @cached_property
    def source(self) -> str:
        """The C++ text of this kernel alone."""
        plan = self.case.storage.plan
        texts = cpp_text.rule_text(self.spec, self.maths), cpp_text.codec_text(plan, self.maths)
        return join.source(*self.joined, *texts).replace(f"using {join.KERNEL} =", "using f =")

    def run_cpp(
        self, tensors: Sequence[tuple[dict[str, torch.Tensor], torch.Tensor, int]], step: int, key: int, isa: str = "",
        threads: int = 1, at: tuple[int, int, int] | None = None, **hypers: Any,
    ) -> None:  # fmt: skip
        """One call over several tensors (buffers, gradient, stream key), for an instruction set of this machine.

        at   of which row and column of a wider tensor they begin, and how many columns that has
        """
        rows = []
        for buffers, g, stream in tensors:
            columns, pointers = rows_and_columns(g.shape)[1], [t.data_ptr() for t in self.ordered(buffers, g)]
            rows.append([*pointers, g.numel(), columns, stream & 0xFFFFFFFF, *(at or (0, 0, columns))])
        table = torch.tensor(rows, dtype=torch.int64)
        rule = self.joined[1]
        made = rule.host(step, 1.0, **self.values(hypers))[: rule.scalars]
        scalars = torch.tensor(made, dtype=torch.float64).float()
        library = compiled(self.source, str(tensors[0][1].dtype).removeprefix("torch."), isa)
        keys = torch.tensor([key], dtype=torch.int32)
        arguments = (table.data_ptr(), len(rows), scalars.data_ptr(), keys.data_ptr(), threads)
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        assert library.optgen_step(*(t(a) for t, a in zip(types, arguments, strict=True))) == 0


def strict(
    rule: str, plan: str, folder: Path, param: str = "bfloat16", flags: Mapping[str, bool] | None = None
) -> Pair:
    """The reference and the strict kernel of a shipped rule under a shipped plan."""
    spec = spec_of(rule)
    return Pair(spec, case_of(spec, plan_of(plan), param, flags), folder)


def compiled(source: str, grad: str, isa: str = "") -> ctypes.CDLL:
    """The library of a file's kernel `f`."""
    before = os.environ.get("OPTGEN_ISA")
    try:
        if isa:
            os.environ["OPTGEN_ISA"] = isa
        (library,) = native.load([native.Job("f", source, ("OPTGEN_KERNEL=f", f"OPTGEN_GRAD={grad}"))])
    finally:
        os.environ.pop("OPTGEN_ISA", None)
        if before is not None:
            os.environ["OPTGEN_ISA"] = before
    if not isinstance(library, ctypes.CDLL):
        raise library
    return library


HEADERS = ROOT / "build" / "headers"
"""The headers that every kernel includes, read once by the compiler; left there for the next run."""

_INCLUDED = (
    "#include <stdint.h>\n#include <string.h>\n#ifdef _OPENMP\n#include <omp.h>\n#endif\n#include <immintrin.h>\n"
)
_made: defaultdict[tuple[str, ...], dict[Any, Any]] = defaultdict(dict)
_FLAGS = native.FLAGS  # as users compile


@contextmanager
def optimized() -> Iterator[None]:
    """C++ kernels compiled within have the flags that users have; the compiler reads its own headers once for them all.

    They are a third of what a kernel takes to compile, and the same text whether they were read before or not.
    """
    with _flags(_FLAGS):
        yield


@contextmanager
def unoptimized() -> Iterator[None]:
    """C++ kernels compiled within are not optimized, and the compiler reads its own headers once for all of them.

    So are all that tests compile, unless they ask for optimized ones or `make test-full` runs.  It takes a fifth of the
    time and gives the same bits: each operation of a strict kernel is one of IEEE 754, no flag
    lets the compiler contract, reorder or replace any (-ffp-contract=off, no -ffast-math), and registers have no
    excess precision, with or without optimization.  What it would not show is a kernel whose C++ means nothing, or
    a wrong compiler: those of tests/test_cpp_*.py and others are always compiled as users compile them.
    """
    with _flags(tuple("-O0" if f == "-O3" else f for f in _FLAGS if not f.startswith("-W"))):
        yield


@contextmanager
def _flags(flags: tuple[str, ...]) -> Iterator[None]:
    """The flags of C++ kernels within, after what is read of the system's headers once for each instruction set."""
    by = native.compiler()
    if by is not None and native.isa().name != "portable":
        flags += ("-include", str(_headers(by, flags, [isa for isa in native.ISAS if isa.needs <= native.cpu_flags()])))
    with mock.patch.object(native, "FLAGS", flags), mock.patch.object(native, "_known", _made[flags]):
        yield


def _headers(by: native.Compiler, flags: tuple[str, ...], sets: Sequence[native.Isa]) -> Path:
    """The system's headers that kernels need, compiled for these flags and each of the instruction sets (25 MB) where
    the compiler can do that: it takes the one that fits from the folder beside the header.
    """
    named = [by.command, by.version, by.flags, flags, [isa.name for isa in sets], _INCLUDED]
    path = HEADERS / hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16] / "optgen_included.h"
    if path.exists():
        return path
    compiled_ = path.with_name(path.name + ".gch")
    compiled_.mkdir(parents=True, exist_ok=True)
    with cache.alone(path), tempfile.TemporaryDirectory(dir=HEADERS) as folder:
        if path.exists():  # of another worker
            return path
        source, made = Path(folder) / path.name, Path(folder) / "made"
        source.write_text(_INCLUDED, encoding="utf-8")
        for isa in sets:
            with suppress(native.Unavailable):  # then it is read each time
                command = [*by.command, *flags, *isa.flags, *by.flags, "-fopenmp", "-x", "c++-header", str(source)]
                native._run([*command, "-o", str(made)])
                os.replace(made, compiled_ / isa.name)
        os.replace(source, path)  # at last: whoever finds it finds what was made of it
    return path


def of_many_sizes(shapes: Sequence[Sequence[int]], dtype: torch.dtype, draw: torch.Generator) -> Iterator[Any]:
    """Yield the gradients of three steps, of sizes from 1e-8 to 1e2; a third of the second ones is 0."""
    for step in range(3):
        grads = []
        for shape in shapes:
            scale = 10.0 ** float(torch.randint(-8, 3, (), generator=draw))
            grads.append((torch.randn(tuple(shape), generator=draw) * scale).to(dtype))
            if step == 1:
                grads[-1].view(-1)[::3] = 0
        yield grads


def by_element(tensor: torch.Tensor, f: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """A field's entries, flat: of packed codes, those of a tensor of that shape, one by one."""
    if f.width == 1:
        return tensor.reshape(-1)
    rows, columns = rows_and_columns(torch.Size(shape))
    codes = Blocks(torch.empty(shape), 64).codes(tensor, f.width)
    return codes.reshape(rows, -1)[:, :columns].reshape(-1)


def make_step(opt: Any) -> None:
    """Make a step; of a rule of two phases both, of the same gradients."""
    if not hasattr(opt, "first_step"):
        opt.step()
        return
    params = [p for group in opt.param_groups for p in group["params"]]
    found = [p.grad for p in params]
    opt.first_step()
    for p, g in zip(params, found, strict=True):
        p.grad = g
    opt.second_step()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # contiguous() lets one element keep its stride of 0, which view() refuses
    return torch.equal(*(x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (a, b)))


def same(a: Any, b: Any) -> bool:
    """Return True for equal values; of floats NaN is NaN and a zero's sign counts."""
    if not isinstance(a, torch.Tensor):
        return bool(a == b or (a != a and b != b))
    if a.dtype.is_floating_point:
        return bool((a.isnan() == b.isnan()).all()) and same_bits(a.nan_to_num(0.0), b.nan_to_num(0.0))
    return same_bits(a, b)
