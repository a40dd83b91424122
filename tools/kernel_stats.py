"""Count what a Triton kernel costs, without a GPU.

A kernel is compiled for a named target, its machine code is disassembled, and the instructions of its main loop are
counted per element and by class.  The counts are what the performance tests compare with their baselines::

    compiled = compile_for(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 256}, TARGETS["sm_90"], num_warps=1)
    print(analyse(compiled, elements=256))

The *main loop* is the range of the widest backward branch; a kernel without one is counted whole.  Kernels that walk
panels have a loop without masks and one with: there it is the narrower.  `elements` is what one iteration
of that loop does for the whole program, so that `per_element` is instructions per thread and element.

Works with Triton 3.6 to 3.9; NVIDIA targets need the `nvdisasm` and `cuobjdump` that come with the Triton wheel, AMD
targets are read from the assembly text of the compiler.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # generated/, specs/ and optgen/ of this checkout

from tools import roofline  # noqa: E402
from tools.prose import packed  # noqa: E402

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


# Compiling ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A kernel as machine code: its listing, and what the compiler says about its resources."""

    name: str
    target: GPUTarget
    num_warps: int
    listing: str
    registers: int
    shared: int
    stack: int
    """Bytes of local memory per thread; on a kernel without local arrays these are spills."""


def compile_for(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    target: GPUTarget,
    num_warps: int = 1,
    *,
    aligned: Iterable[str] = (),
    listed: bool = True,
    **options: Any,
) -> Compiled:
    """Compile the `@triton.jit` function `fn` for `target`.

    `signature` gives the type of every run-time argument ("*i64", "i32", "fp32" ...), `constexprs` the value of every
    other one.  `aligned` names the arguments known to be divisible by 16 (pointers, as a launch would find them).
    `options` are Triton's own; contraction is off unless asked for, as in every kernel whose fma are written out.
    Without `listed` the instructions of a kernel for NVIDIA are not read.
    """
    constexprs = dict(constexprs)
    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    if missing := [name for name in fn.arg_names if name not in signature and name not in constexprs]:
        raise ValueError(f"{fn.__name__}: neither a type nor a value is given for {', '.join(missing)}")
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    # Kernels ask the driver what they are compiled for; there is none on a machine without a GPU.
    driver.set_active(_NoDevice(target))
    kernel = triton.compile(
        ASTSource(fn, types, constexprs, attrs),
        target=target,
        options={"num_warps": num_warps, "enable_fp_fusion": False, **options},
    )
    if target.backend == "cuda":
        listing, registers, stack = _read_nvidia(kernel.asm, listed)
    else:
        listing, registers, stack = _read_amd(kernel.asm)
    return Compiled(fn.__name__, target, num_warps, listing, registers, int(kernel.metadata.shared), stack)


@dataclass(frozen=True)
class _NoDevice:
    """The part of a driver that compiling needs."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target


def _read_nvidia(asm: Mapping[str, Any], listed: bool) -> tuple[str, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        listing = _call("nvdisasm", "-c", cubin) if listed else ""
        usage = _call("cuobjdump", "-res-usage", cubin)
    stack = max(_number(r"\bSTACK:(\d+)", usage), _number(r"\bLOCAL:(\d+)", usage))
    return listing, _number(r"\bREG:(\d+)", usage), stack


def _read_amd(asm: Mapping[str, Any]) -> tuple[str, int, int]:
    listing = asm["amdgcn"]
    stack = _number(r"\.private_segment_fixed_size:\s+(\d+)", listing)
    return listing, _number(r"\.vgpr_count:\s+(\d+)", listing), stack


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no match for {pattern!r} in the compiler's output:\n{text[-400:]}")
    return int(found[1])


def _call(tool: str, *arguments: str | Path) -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    path = str(bundled) if bundled.exists() else shutil.which(tool)
    if path is None:
        raise FileNotFoundError(f"{tool} is neither in the Triton wheel nor on PATH")
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


# Reading the listing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: the opcode with its modifiers, the operands as text."""

    opcode: str
    operands: str = ""


@dataclass(frozen=True)
class Code:
    """Instructions in order, and the position each label stands before."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    def loops(self) -> list[range]:
        """The ranges of backward branches."""
        return [
            range(self.labels[target], end + 1)
            for end, instruction in enumerate(self.instructions)
            if (target := _branch_target(instruction)) is not None and self.labels.get(target, end) < end
        ]

    def main_loop(self, narrowest: bool = False) -> range:
        """The range of the widest backward branch, or everything where there is none; `narrowest`: of those that load
        a tile from memory."""
        loops = self.loops()
        opcodes = [[self.instructions[k].opcode for k in x] for x in loops]
        loaded = [sum(width(o) for o in some if re.match(r"LDG|global_load", o)) for some in opcodes]
        if narrowest and any(loaded):
            # Masked or not, a tile is loaded; narrow loops beside may load a value or two.
            return min((x for x, bits in zip(loops, loaded, strict=True) if 2 * bits >= max(loaded)), key=len)
        return max(loops, key=len, default=range(len(self.instructions)))


_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_SASS_LABEL = re.compile(r"^(\.L\w+):")
_GCN = re.compile(r"^\s+([a-z]\w+)\s*(.*)$")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")


def read_sass(listing: str) -> Code:
    """Read the output of `nvdisasm -c`."""
    return _read(listing, _SASS.search, _SASS_LABEL)


def read_gcn(listing: str) -> Code:
    """Read the text of an AMD assembly file, up to the end of its first function."""
    body = re.split(r"^\.Lfunc_end", listing, maxsplit=1, flags=re.MULTILINE)[0]
    return _read(re.sub(r"\s*;.*$", "", body, flags=re.MULTILINE), _GCN.match, _GCN_LABEL)


def _read(listing: str, match: Any, label: re.Pattern[str]) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if name := label.match(line):
            labels[name[1]] = len(instructions)
        elif found := match(line):
            instructions.append(Instruction(found[1], found[2].strip()))
    return Code(tuple(instructions), labels)


def _branch_target(instruction: Instruction) -> str | None:
    if instruction.opcode.startswith(("BRA", "s_branch", "s_cbranch")):
        found = re.search(r"\.L\w+", instruction.operands)
        return found[0] if found else None
    return None


# Classes of instructions ----------------------------------------------------------------------------------------------

# The first pattern that matches the start of an opcode gives its class.
SASS_CLASSES: Sequence[tuple[str, str]] = (
    ("xu", r"MUFU"),
    ("convert", r"(F2I|I2F|FRND|F2F|I2I)\b"),
    ("fma", r"(FADD|FMUL|FFMA|IMAD|HFMA2|HADD2|HMUL2|IMUL)"),
    ("shuffle", r"(SHFL|REDUX|CREDUX)"),
    ("barrier", r"BAR"),
    ("load", r"(LDG|LD)\b"),
    ("store", r"(STG|ST)\b"),
    ("shared", r"(LDS|STS|LDSM|STSM|LDGSTS|ATOMS)"),
    ("local", r"(LDL|STL)"),
    ("constant", r"(LDC|ULDC|LDCU)"),
    ("call", r"(CALL|RET)"),
    ("branch", r"(BRA|BSSY|BSYNC|EXIT|WARPSYNC|NOP|DEPBAR|BREAK|NANOSLEEP)"),
    ("uniform", r"(U[A-Z]|R2UR|S2UR|VOTEU)"),
    ("alu", r""),
)
GCN_CLASSES: Sequence[tuple[str, str]] = (
    ("trans", r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_"),
    ("convert", r"v_cvt_(?!pk_bf16)"),
    ("valu", r"v_"),
    ("load", r"(global|flat|buffer)_load"),
    ("store", r"(global|flat|buffer)_store"),
    ("spill", r"scratch_"),
    ("shared", r"ds_"),
    ("barrier", r"s_barrier"),
    ("wait", r"s_(waitcnt|nop|delay)"),
    ("branch", r"s_(c?branch|endpgm)"),
    ("scalar", r"s_"),
    ("other", r""),
)
# What a wavefront issues on its vector unit.
VALU = ("valu", "trans", "convert")


def classify(opcode: str, classes: Sequence[tuple[str, str]]) -> str:
    """The class of an opcode.

    >>> [classify(opcode, SASS_CLASSES) for opcode in ("FFMA", "IMAD.U32", "MUFU.RSQ", "LDG.E.128", "ULEA", "LOP3.LUT")]
    ['fma', 'fma', 'xu', 'load', 'uniform', 'alu']
    """
    return next(name for name, pattern in classes if re.match(pattern, opcode))


def width(opcode: str) -> int:
    """Bits a load or store moves for each thread.

    >>> [width(opcode) for opcode in ("LDG.E.128", "STG.E.U8", "LDG.E.EF", "global_load_dwordx4", "global_store_short")]
    [128, 8, 32, 128, 16]
    """
    if opcode.startswith(("LD", "ST")):
        found = re.search(r"\.(?:[US](8|16)|(64|128|256))\b", opcode)
        return int(found[1] or found[2]) if found else 32
    found = re.search(r"(byte|short|dwordx(\d)|dword)", opcode)
    if found is None:
        return 32
    return {"byte": 8, "short": 16}.get(found[1], 32 * int(found[2] or 1))


# The answer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """The cost of a kernel. Counts are instructions of one thread in one iteration of the main loop."""

    name: str
    target: str
    per_element: float
    """Instructions per element: all of them on NVIDIA, those of the vector unit on AMD."""
    elements_per_thread: float
    classes: dict[str, int]
    loads: dict[int, int] = field(default_factory=dict)
    """Loads from memory by width in bits."""
    stores: dict[int, int] = field(default_factory=dict)
    registers: int = 0
    shared: int = 0
    stack: int = 0
    bytes: float = 0.0
    """Bytes that a sweep loads and stores per element, by its schedule; 0 for other kernels."""
    cost: roofline.Cost | None = None
    """The cost of a sweep as it is launched, on targets whose rates are known."""

    def __str__(self) -> str:
        each = " ".join(
            f"{name}={count / self.elements_per_thread:.2f}"
            for name, count in sorted(self.classes.items(), key=lambda item: -item[1])
        )
        return (
            f"{self.target}: {self.per_element:.1f}/elem ({each})"
            f" loads={_widths(self.loads)} stores={_widths(self.stores)}"
            f" regs={self.registers} shared={self.shared} stack={self.stack}"
        )


def _widths(counts: Mapping[int, int]) -> str:
    return ",".join(f"{count}x{bits}b" for bits, count in sorted(counts.items(), reverse=True)) or "none"


def analyse(
    compiled: Compiled, elements: int, narrowest: bool = False, grain: tuple[int, int] = (0, 0), loads: float = 0.0
) -> Stats:
    """Count the main loop of `compiled`, one iteration of which does `elements` elements for the whole program.

    grain  rows and columns of a full work item; its cost is counted where there is one
    loads  bits that are loaded for each element: an iteration that loads several times as many is unrolled
    """
    nvidia = compiled.target.backend == "cuda"
    code = read_sass(compiled.listing) if nvidia else read_gcn(compiled.listing)
    table = SASS_CLASSES if nvidia else GCN_CLASSES
    # nvdisasm pads a kernel with no-operations after its last branch.
    main = code.main_loop(narrowest)
    loop = [i for k in main if (i := code.instructions[k]).opcode != "NOP"]
    classes = Counter(classify(instruction.opcode, table) for instruction in loop)
    counted = classes.total() if nvidia else sum(classes[name] for name in VALU)
    share = elements / (compiled.target.warp_size * compiled.num_warps)
    if loads:
        loaded = sum(width(i.opcode) for i in loop if classify(i.opcode, table) == "load")
        unrolled = max(round(loaded / (share * loads)), 1)
        share, elements = share * unrolled, elements * unrolled
    widths = {
        kind: Counter(width(i.opcode) for i in loop if classify(i.opcode, table) == kind) for kind in ("load", "store")
    }
    cost = None
    if grain[0] and compiled.target == TARGETS[roofline.TARGET]:
        of_loop = code.loops(), main, grain[0] * grain[1] // elements, share
        cost = roofline.cost(code.instructions, *of_loop, grain, compiled.registers, compiled.num_warps)
    return Stats(
        cost=cost,
        name=compiled.name,
        target=f"sm_{compiled.target.arch}" if nvidia else str(compiled.target.arch),
        per_element=round(counted / share, 2),
        elements_per_thread=share,
        classes=dict(classes),
        loads=dict(widths["load"]),
        stores=dict(widths["store"]),
        registers=compiled.registers,
        shared=compiled.shared,
        stack=compiled.stack,
    )


# Command line ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One kernel to count: what `compile_for` and `analyse` need, under a name for the table."""

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    elements: int
    num_warps: int = 1
    aligned: tuple[str, ...] = ()
    targets: tuple[str, ...] = tuple(TARGETS)
    """A kernel whose tile depends on the number of threads in a warp is one job for each of its tiles."""
    panels: bool = False
    tiled: bool = False
    """A sweep over tiles, whose elements do not work together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes: float = 0.0
    """Bytes that a sweep loads and stores per element."""
    loads: float = 0.0
    """Bits that a walk of panels loads for each element, values of columns too."""
    grain: tuple[int, int] = (0, 0)
    """Rows and columns of a full work item; one row: so many elements of any tensor."""


# What the performance tests hold to their baselines: the rules with one and two moments, and what storage costs.
CHOSEN: Sequence[tuple[str, str, str]] = (
    ("adamw", "int8_split24", "bfloat16"),
    ("adamw", "int8_rn_split24", "bfloat16"),
    ("adamw", "fp32", "float32"),
    ("lion", "int8_split24", "bfloat16"),
    ("lion", "int8_rn_split24", "bfloat16"),
    ("sgd", "int8_split24", "bfloat16"),
    ("sgd", "int8_rn_split24", "bfloat16"),
)
# What other formats cost, on one target: random bits without codes, f16 weights, plans of peers, tables, rank-1 scales
# and factors.
WATCHED: Sequence[tuple[str, str, str]] = (
    ("adamw", "bf16_sr", "bfloat16"),
    ("adamw", "int8_split24", "float16"),
    ("adamw", "bnb8", "bfloat16"),
    ("adamw", "torchao4", "bfloat16"),
    ("adamw", "lpmm4", "bfloat16"),
    ("adamw", "int5_factored_split24", "bfloat16"),
)
WATCHED_ON = "sm_90"
BASELINES = ROOT / "tests" / "baselines" / "kernel_stats.json"
RECORD = ROOT / "docs" / "benchmarks" / "kernels.json"
_POINTERS = {"table": "*i64", "work": "*i32", "step_key": "i32"}


def jobs_of(name: str, module: Any, function: str, grad: str) -> Iterable[Job]:
    """A generated kernel as jobs: `tile` elements for 32 lanes, as many for each on targets with more."""
    import triton.language as tl

    from optgen.runtime.gpu.compiled import launched
    from optgen.runtime.layout.workspace import SMALL_SEGMENT
    from optgen.runtime.records import sums
    from optgen.runtime.step import launch

    fn, tile = getattr(module, function), module.TILE[function]

    limits = {t: launch.limits(module, function, gpu.arch // 10) for t, gpu in TARGETS.items() if gpu.backend == "cuda"}
    sweep = module.CONSTANTS[function]["SWEEP"]
    signature = {a: _POINTERS.get(a, "fp32") for a in fn.arg_names if a != "SWEEP"}
    for target, gpu in TARGETS.items():
        size = tile * gpu.warp_size // 32
        segments = {"": sums.SEGMENT if sweep.sums else launch.TILES * size}
        if sweep.sums and module.WARPS[function] == 1 and not sweep.strict:
            segments["_few"] = SMALL_SEGMENT
        for few, segment in segments.items():
            how = {"tiles": segment // size, "tile": size, "aligned": True}
            yield Job(
                name + few,
                fn,
                signature,
                {"SWEEP": launched(sweep, grad=getattr(tl, grad), **how)},
                elements=2 * size,  # pairs of tiles
                grain=(1, segment),
                bytes=moved(replace(sweep, grad=getattr(tl, grad)))[0],
                aligned=("table", "work"),
                num_warps=max(module.WARPS[function] * 32 // gpu.warp_size, 1),
                targets=(target,),
                tiled=True,
                options=limits.get(target, {}),
            )


def moved(sweep: Any) -> tuple[float, float]:
    """Return the bytes per element that a sweep loads and stores, values of rows and columns not counted, and the bits
    that it loads with the latter."""

    def size(i: int) -> float:
        elements = {"": 1, "eight": 8, "block": sweep.block}.get(sweep.kind(i))
        return sweep.dtype(i).primitive_bitwidth / elements if elements else 0.0

    loaded = {i for x in sweep.values[: sweep.taken] for i in x.fields}
    stored = {i for k, _ in sweep.stores for i in sweep.values[k].stores} | {i for x in sweep.views for i in x.stores}
    bits = sum(map(size, loaded))
    return (bits + sum(map(size, stored))) / 8, bits + 32 * sum(sweep.kind(i) == "col" for i in loaded)


def of_variants(name: str, pair: Any, kernels: Any, only: Collection[str] | None = None) -> Iterable[Job]:
    """The kernels of a pair; `only`: of these variants."""
    for v in pair.variants:
        if only is not None and v.function not in only:
            continue
        if v.stages:
            yield from of_stages(f"{name}.{v.function}", kernels, v)
        elif v.single:
            yield from jobs_of(f"{name}.{v.function}", kernels, v.function, v.param)


def named(spec_name: str, plan_name: str) -> tuple[Any, Any]:
    """A ready-made spec and plan."""
    spec = getattr(importlib.import_module(f"specs.{spec_name}"), spec_name)
    return spec, getattr(importlib.import_module("specs.plans"), plan_name)


def case_of(spec_name: str, plan_name: str, param: str) -> Any:
    """The case of flags at their defaults; where a rule differs in a derived one only, with that on."""
    from optgen.driver import targets

    spec, plan = named(spec_name, plan_name)
    cases = [c for c in targets.cases(spec, plan) if c.storage.param.torch == param and not c.small and not c.vector]
    wanted = {f.name: f.default or f.nonzero is not None for f in spec.flags}
    return max(cases, key=lambda c: sum(wanted[k] == v for k, v in dict(c.flags).items()))


def in_stages(spec_name: str, plan_name: str, param: str) -> bool:
    """Return True if a step of that case takes several kernels."""
    from optgen.driver import record_text, targets

    name = targets.case_name(named(spec_name, plan_name)[0], case_of(spec_name, plan_name, param))
    return next(v for v in record_text.variants(*named(spec_name, plan_name)) if v.function == name).single is None


def chosen() -> Iterable[Job]:
    """The kernels of CHOSEN, built from the specs as they are now."""
    for named in CHOSEN:
        yield from of_one_sweep(*named)


def watched() -> Iterable[Job]:
    """The sweeps of WATCHED, likewise."""
    for named in WATCHED:
        several = in_stages(*named)
        for job in of_several_sweeps(*named) if several else of_one_sweep(*named):
            if WATCHED_ON in job.targets and (job.panels or not several) and not job.name.endswith("_few"):
                yield job


def of_one_sweep(spec_name: str, plan_name: str, param: str) -> Iterable[Job]:
    """The kernel of a step."""
    from optgen.driver import targets, triton_text

    spec, plan = named(spec_name, plan_name)
    _, module = triton_text.joined(spec, plan, "fast", _module)
    name = f"{spec_name}.{plan_name}" + (f".{param}" if param == "float16" else "")
    yield from jobs_of(name, module, targets.case_name(spec, case_of(spec_name, plan_name, param)), param)


def of_several_sweeps(spec_name: str, plan_name: str, param: str) -> Iterable[Job]:
    """The kernels of a step."""
    from optgen.driver import targets, triton_text

    spec, plan = named(spec_name, plan_name)
    pair, module = triton_text.joined(spec, plan, "fast", _module)
    wanted = targets.case_name(spec, case_of(spec_name, plan_name, param))
    variant = next(v for v in pair.variants if v.function == wanted)
    yield from of_stages(f"{spec_name}.{plan_name}", module, variant)


def of_stages(name: str, module: Any, variant: Any) -> Iterable[Job]:
    """The kernels of a variant's stages: <name>.<number>, and <name>.<number>_flat for tensors that no panels fit.

    A sweep that takes smaller panels where there are few is also counted with those, as <name>.<number>_few.
    """
    import torch
    import triton.language as tl

    from optgen.runtime.gpu.compiled import launched
    from optgen.runtime.layout import workspace
    from optgen.runtime.step import launch

    for number, stage in enumerate(variant.stages, 1):
        known = module.CONSTANTS.get(stage.kernel)
        if known is None:
            continue
        if stage.kernel in module.TILE:
            yield from jobs_of(f"{name}.{number}", module, stage.kernel, variant.param)
        elif "LEVEL" in known:
            yield from _staged(f"{name}.{number}", module, stage.kernel, known, 2048, launch.stages.BETWEEN)
        else:
            sweep, warps, grad = known["SWEEP"], module.WARPS[stage.kernel], getattr(tl, variant.param)
            shapes = [torch.Size((n, 4096)) for n in (2**17, 4096)]
            for rows, across in dict.fromkeys(workspace.panel(variant, stage, shape) for shape in shapes):
                tile = launch.stages.rows_together(stage, across)
                how = {"tiles": rows // tile, "tile": tile, "across": across, "aligned": True}
                of = {"SWEEP": launched(sweep, grad=grad, **how)}
                which = f"{name}.{number}" + "_few" * (across < sweep.across)
                yield from _staged(which, module, stage.kernel, of, across, warps, True)
            of = {"SWEEP": launched(sweep, grad=grad, tiles=16, tile=1, ragged=True)}
            yield from _staged(f"{name}.{number}_flat", module, stage.kernel, of, 256, 1)


def _staged(
    name: str, module: Any, function: str, constants: Mapping[str, Any], width: int, warps: int, panels: bool = False
) -> Iterable[Job]:
    """A kernel that walks panels or is between sweeps, as a job for each target."""
    from optgen.runtime.step import launch

    fn = getattr(module, function)
    sweep = constants.get("SWEEP")
    grain = (sweep.tiles * sweep.tile, width) if panels else (0, 0)
    elements = width * sweep.tile if panels else width
    signature = {a: _POINTERS.get(a, "fp32") for a in fn.arg_names if a not in constants}
    for target, gpu in TARGETS.items():
        planned = function + "_few" * name.endswith("_few")
        told = launch.limits(module, planned, gpu.arch // 10) if gpu.backend == "cuda" and panels else {}
        fewer = max(warps * 32 // gpu.warp_size, 1)
        yield Job(
            name, fn, signature, constants, elements, fewer, ("table", "work"), (target,), panels, options=told,
            grain=grain, **(dict(zip(("bytes", "loads"), moved(constants["SWEEP"]), strict=True)) if panels else {}),
        )  # fmt: skip


def sweeps(names: Sequence[str] = ()) -> Iterable[Job]:
    """The sweeps of every rule under int8_split24, and of AdamW under every plan, that tensors of at most two
    dimensions take; only of rules in `names`, which may go on after a dot."""
    from optgen.formats.plan import Plan

    wanted = {name.split(".")[0] for name in names}
    found = [(path.stem, "int8_split24") for path in sorted((ROOT / "specs").glob("*.py"))]
    plans = vars(importlib.import_module("specs.plans")).items()
    found += [("adamw", name) for name, plan in plans if isinstance(plan, Plan)]
    for spec_name, plan_name in dict.fromkeys(found):
        if spec_name in ("__init__", "plans") or (wanted and not any(w in spec_name for w in wanted)):
            continue
        param = "float32" if plan_name == "fp32" else "bfloat16"
        several = in_stages(spec_name, plan_name, param)
        for job in (of_several_sweeps if several else of_one_sweep)(spec_name, plan_name, param):
            if job.bytes:
                yield job


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of this process' modules; it is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="kernel_stats_")


_NUMBERS = itertools.count()  # a module is a file of its own, as often as a name comes


def _module(name: str, text: str) -> Any:
    """A module of that source; Triton reads kernels back from a file."""
    path = Path(_folder().name, str(next(_NUMBERS)), f"{name}.py")
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def compiled_to_fit(job: Job, target: str, listed: bool = False) -> tuple[Compiled, Compiled]:
    """A job's kernel within the registers that are planned for it, and as the first step on a device compiles it."""
    from optgen.runtime.gpu import compiled

    made: list[Compiled] = []

    def spills(options: Mapping[str, Any]) -> int:
        made.append(compile_for(
            job.fn, job.signature, job.constexprs, TARGETS[target], job.num_warps,
            aligned=job.aligned, listed=listed, **options,
        ))  # fmt: skip
        return made[-1].registers if made[-1].stack and TARGETS[target].backend == "cuda" else 0

    compiled.without_spills(job.options, spills, job.num_warps)
    return made[0], made[-1]


def count(job: Job, target: str) -> Stats:
    """Count a kernel; one that spills in the registers that are planned for it, with those that it is launched with."""
    planned, made = compiled_to_fit(job, target, listed=True)
    stats = analyse(made, job.elements, job.panels or job.tiled, job.grain if job.bytes else (0, 0), job.loads)
    return replace(stats, bytes=job.bytes, stack=planned.stack)


def update(results: Mapping[str, Stats]) -> None:
    """Writes the counts as this Triton version's baselines."""
    kept = json.loads(BASELINES.read_text(encoding="utf-8")) if BASELINES.exists() else {}
    kept[triton.__version__] = {
        name: {"per_element": s.per_element, "registers": s.registers} for name, s in sorted(results.items())
    }
    BASELINES.parent.mkdir(exist_ok=True)
    BASELINES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def record(results: Mapping[str, Stats], kept: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return docs/benchmarks/kernels.json: sweeps against what memory leaves time for, and the rows of others."""
    pipes = ("issue", "ALU", "FMA", "XU", "LSU")
    lists = {"many": (), "matrix": roofline.MATRIX, "GPT-2": roofline.GPT2}
    head = ["bytes", "instructions", *pipes, "registers"]
    head += [f"{card}, {name}" for name in lists for card in roofline.CARDS]
    rows = {**kept}
    for name, s in results.items():
        kernel, target = name.split(" ")
        few = results.get(f"{kernel}_few {target}", s).cost
        if kernel.endswith("_few"):
            continue
        assert s.cost is not None and few is not None
        busy = s.cost.busy(roofline.CARDS["H200"], s.bytes)
        shares = [
            (few if some else s.cost).share(card, s.bytes, some)
            for some in lists.values() for card in roofline.CARDS.values()
        ]  # fmt: skip
        percent = (round(100 * busy.get(p, 0.0)) for p in pipes)
        numbers = (round(s.bytes, 2), round(s.cost.launched, 1), *percent, s.registers, *(round(x, 2) for x in shares))
        rows[kernel] = [*numbers]
    return {"triton": triton.__version__, "target": roofline.TARGET, "columns": head, "sweeps": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Count the chosen kernels on the chosen targets; 1 where one spills to local memory that is not known to."""
    parser = argparse.ArgumentParser(description="Instructions per element of the generated kernels, without a GPU.")
    parser.add_argument("names", nargs="*", help="only the kernels whose name contains one of these")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all of them")
    parser.add_argument("--chosen", action="store_true", help="those of the performance tests (the default)")
    parser.add_argument("--sweeps", action="store_true", help="the sweeps of every rule, and of AdamW under every plan")
    parser.add_argument("--watched", action="store_true", help=f"those of other formats, on {WATCHED_ON}")
    parser.add_argument("--update", action="store_true", help="write the chosen and watched kernels' as baselines")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--record", action="store_true", help=f"--sweeps for {roofline.TARGET} into {RECORD.name}")
    asked = parser.parse_args(arguments)
    if asked.record and (not asked.sweeps or asked.target != [roofline.TARGET]):
        parser.error(f"--record is for --sweeps --target {roofline.TARGET}; with names, rows of others stay")
    old = json.loads(RECORD.read_text(encoding="utf-8"))
    if asked.record and asked.names and old["triton"] != triton.__version__:
        parser.error(f"{RECORD.name} is of Triton {old['triton']}, not {triton.__version__}: record all, without names")
    results: dict[str, Stats] = {}
    jobs: list[Callable[[], Iterable[Job]]] = [partial(sweeps, asked.names)] * asked.sweeps
    jobs += [chosen] * asked.chosen + [watched] * asked.watched
    jobs = [chosen, watched] if asked.update else jobs or [chosen]
    for job in (job for some in jobs for job in some()):
        if asked.names and not any(name in job.name for name in asked.names):
            continue
        for target in job.targets:
            if asked.target and target not in asked.target:
                continue
            stats = results[f"{job.name} {target}"] = count(job, target)
            if asked.json:
                print(json.dumps({"kernel": job.name, "triton": triton.__version__, **asdict(stats)}), flush=True)
            else:
                print(job.name, stats, flush=True)
    if asked.update:
        update(results)
    if asked.record:
        RECORD.write_text(packed(record(results, old["sweeps"] if asked.names else {})), encoding="utf-8")
    return int(any(s.stack > 0 and name.split()[0] not in roofline.SPILLING for name, s in results.items()))


if __name__ == "__main__":
    sys.exit(main())
