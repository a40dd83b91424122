"""The Triton text of single sweeps: one module for each rule, one of codecs for each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any

from optgen import passes
from optgen.backends import columns, triton_text
from optgen.backends.codec import CodecText
from optgen.backends.printer import listed, wrapped
from optgen.driver import kernel_text, plan_formats, record_text, targets
from optgen.driver.project import Maths
from optgen.formats.format import Format
from optgen.formats.plan import Plan
from optgen.formats.views import VIEWS
from optgen.ir import node as ir
from optgen.ir.program import Program, Store
from optgen.lang.spec import Spec
from optgen.lower import CodecPrograms, lower_codec, lower_weight
from optgen.runtime.records.join import Pair, with_steps

FILE = "triton.py"
STRICT = "strict.py"
"""The files of tiles and codecs: those of kernels, and those in strict maths that the eager reference runs."""

Import = Callable[[str, str], ModuleType]
"""(name, text) -> the module of that text."""


def _module(header: str, lines: list[str], kernels: bool = True) -> str:
    compiled = any("triton.jit" in line for line in lines)
    head = ["import triton", "import triton.language as tl", ""] if compiled else []
    head = [header, "# fmt: off", "# ruff: noqa", *head]
    return columns.python("\n".join([*head, *triton_text.imports(lines), *lines]).rstrip("\n") + "\n", kernels=kernels)


# -- rules


def rule_text(spec: Spec, maths: Maths) -> str:
    """Return the text of generated/<rule>/triton.py."""
    made = kernel_text.rule_kernels(spec, maths)
    nonneg = {s.name for s in spec.states if s.nonneg}
    lines: list[str] = []
    known: dict[str, str] = {}
    done: set[str] = set()
    for setting in made.settings:
        kernels = zip(setting.kernels, setting.levels, setting.step.stages, strict=True)
        for _, level in groupby(((k, at) for k, at, s in kernels if not s.call), key=lambda x: x[1]):
            stages = [(k, made.stages[k]) for k, _ in level if k not in done]
            done.update(k for k, _ in stages)
            if stages and not stages[0][1].is_sweep:
                lines += ["", "", *triton_text.level_functions([(k, s.schedule) for k, s in stages], known)]
                continue
            for kernel, stage in stages:
                lines += ["", "", *triton_text.sweep_functions(stage.schedule, kernel, nonneg)]
    return _module(targets.mark(spec.loc.file, f"{spec.name} · triton, {maths} maths"), lines)


def tile_text(spec: Spec) -> str:
    """Return the text of generated/<rule>/strict.py: the functions of tiles and of small work, in strict maths, which
    the eager reference runs."""
    nonneg = {s.name for s in spec.states if s.nonneg}
    lines: list[str] = []
    known: dict[str, str] = {}
    for kernel, stage in kernel_text.rule_kernels(spec, "strict").stages.items():
        if stage.call:
            continue
        if stage.is_sweep:
            lines += ["", "", *triton_text.tile_function(stage.schedule, kernel, nonneg)]
            continue
        function, text = triton_text.values_function(stage.schedule, kernel, known)
        lines += ["", "", *(text or [f"{kernel}_values = {function}"])]
    return _module(targets.mark(spec.loc.file, f"{spec.name} · tiles, strict maths"), lines, kernels=False)


# -- plans


def _codec(made: CodecPrograms, signed: bool, maths: Maths, whole: record_text.WholeWork | None = None) -> CodecText:
    """The steps of a format; `whole`: the small work of one that keeps states as a whole."""
    c, (store,) = ir.sym(triton_text.C), made.decode.stores
    ranges = () if signed else ((triton_text.C, (0.0, triton_text.LARGEST)),)
    product = Store(store.buffer, ir.op("mul", c, store.node))
    decode: Program = replace(made.decode, stores=(product,), hypers=(triton_text.C,), ranges=ranges)
    steps = [None if p is None else passes.step(p, maths) for p in (decode, made.root, made.encode, made.nearest)]
    assert steps[0] is not None and steps[3] is not None
    names = tuple(suffix or "code" for suffix, field in made.fields.items() if field.space == "elem")
    codec = CodecText(names, steps[0], steps[1], steps[2], steps[3])
    return codec if whole is None else replace(codec, reads=whole.reads, given=whole.given, small=whole.small)


def codecs(plan: Plan, maths: Maths) -> Iterator[tuple[str, CodecText, Format | None, str]]:
    """Yield the name, the steps, the format and its description of each codec that a tile function may use."""
    for param in plan.master.params:
        made = _codec(lower_weight(plan.master, param), True, maths)
        yield f"weight_{param.name}", made, None, plan.master.describe(param)
    for name, fmt in plan_formats.formats(plan).items():
        made = _codec(lower_codec(fmt), fmt.signed, maths, record_text.whole_work(fmt, maths))
        yield name, made, fmt, str(fmt)
    for name in plan.views:  # quantizers have its bits, whatever the maths of a step
        yield name, _codec(lower_codec(VIEWS[name]), True, "strict"), VIEWS[name], str(VIEWS[name])


@lru_cache(maxsize=256)
def codec_text(plan: Plan, maths: Maths) -> str:
    """Return the text of a plan's Triton codecs."""
    found = list(codecs(plan, maths))
    numbers: dict[str, tuple[float, ...]] = {}
    lines: list[str] = []
    for function in triton_text.table_functions([codec for _, codec, _, _ in found]):
        lines += ["", "", *function]
    records: list[str] = []
    for name, codec, fmt, doc in found:
        for function in triton_text.codec_functions(codec, name):
            lines += ["", "", *function]
        numbers |= triton_text.numbers(codec)
        given = triton_text.codec_record(codec, name, plus=fmt is not None and fmt.plus_zero)
        records += ["", f"# {doc}", *wrapped(f"{name} = Codec(", given, ")")]
    tables = [line for name, x in sorted(numbers.items()) for line in listed(name, x)]
    header = targets.mark(plan.loc.file, f"plan {plan.name} · triton codecs, {maths} maths")
    lines = [*([""] if tables else []), *tables, *lines, "", *records]
    return _module(header, lines)


# -- both


def joined(spec: Spec, plan: Plan, maths: Maths, module: Import) -> tuple[Pair, Any]:
    """Return a rule under a plan without its C++ kernels, and the Triton kernels of its single sweeps."""
    from optgen.runtime.gpu.join import kernels

    records = module("records", record_text.rule_text(spec, maths))
    variants = with_steps(records.RULES, records.STEPS, record_text.plan_record(plan, maths))
    pair = Pair(plan.name, tuple(variants), plan.small_numel)
    return pair, kernels(pair, module("rule", rule_text(spec, maths)), module("codecs", codec_text(plan, maths)))
