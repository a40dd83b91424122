"""Count what a Triton kernel costs, without a GPU.

A kernel is compiled for a named target, its machine code is disassembled, and the instructions of its main loop are
counted per element and by class.  The counts are what the performance tests compare with their baselines::

    compiled = compile_for(kernel, {"x": "*fp32", "n": "i32"}, {"BLOCK": 256}, TARGETS["sm_90"], num_warps=1)
    print(analyse(compiled, elements=256))

The *main loop* is the range of the widest backward branch; a kernel without one is counted whole.  `elements` is what
one iteration of that loop does for the whole program, so that `per_element` is instructions per thread and element.

Works with Triton 3.6 to 3.9; NVIDIA targets need the `nvdisasm` and `cuobjdump` that come with the Triton wheel, AMD
targets are read from the assembly text the compiler prints.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
    **options: Any,
) -> Compiled:
    """Compile the `@triton.jit` function `fn` for `target`.

    `signature` gives the type of every run-time argument ("*i64", "i32", "fp32" ...), `constexprs` the value of every
    other one.  `aligned` names the arguments known to be divisible by 16 (pointers, as a launch would find them).
    `options` are Triton's own; contraction is off unless asked for, as in every kernel whose fma are written out.
    """
    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    if missing := [name for name in fn.arg_names if name not in signature and name not in constexprs]:
        raise ValueError(f"{fn.__name__}: neither a type nor a value is given for {', '.join(missing)}")
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    kernel = triton.compile(
        ASTSource(fn, types, dict(constexprs), attrs),
        target=target,
        options={"num_warps": num_warps, "enable_fp_fusion": False, **options},
    )
    read = _read_nvidia if target.backend == "cuda" else _read_amd
    listing, registers, stack = read(kernel.asm)
    return Compiled(fn.__name__, target, num_warps, listing, registers, int(kernel.metadata.shared), stack)


def _read_nvidia(asm: Mapping[str, Any]) -> tuple[str, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        listing = _call("nvdisasm", "-c", cubin)
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

    def main_loop(self) -> tuple[Instruction, ...]:
        """The range of the widest backward branch, or everything where there is none."""
        loops = [
            (self.labels[target], end + 1)
            for end, instruction in enumerate(self.instructions)
            if (target := _branch_target(instruction)) is not None and self.labels.get(target, end) < end
        ]
        start, stop = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, len(self.instructions)))
        return self.instructions[start:stop]


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
    """What a kernel costs.  Counts are instructions of one thread in one iteration of the main loop."""

    name: str
    target: str
    per_element: float
    """Instructions per element: all of them on NVIDIA, those of the vector unit on AMD."""
    elements_per_thread: float
    classes: dict[str, int]
    loads: dict[int, int] = field(default_factory=dict)
    """Loads from memory by width in bits."""
    stores: dict[int, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)
    registers: int = 0
    shared: int = 0
    stack: int = 0
    outside: int = 0
    """Instructions outside the main loop (prologue, tail, slow paths)."""

    def __str__(self) -> str:
        each = " ".join(
            f"{name}={count / self.elements_per_thread:.2f}"
            for name, count in sorted(self.classes.items(), key=lambda item: -item[1])
        )
        return (
            f"{self.name} {self.target}: {self.per_element:.1f}/elem ({each})"
            f" loads={_widths(self.loads)} stores={_widths(self.stores)}"
            f" regs={self.registers} shared={self.shared} stack={self.stack} outside={self.outside}"
        )


def _widths(counts: Mapping[int, int]) -> str:
    return ",".join(f"{count}x{bits}b" for bits, count in sorted(counts.items(), reverse=True)) or "none"


def analyse(compiled: Compiled, elements: int) -> Stats:
    """Count the main loop of `compiled`, one iteration of which does `elements` elements for the whole program."""
    nvidia = compiled.target.backend == "cuda"
    code = read_sass(compiled.listing) if nvidia else read_gcn(compiled.listing)
    table = SASS_CLASSES if nvidia else GCN_CLASSES
    # nvdisasm pads a kernel with no-operations after its last branch.
    loop = [instruction for instruction in code.main_loop() if instruction.opcode != "NOP"]
    classes = Counter(classify(instruction.opcode, table) for instruction in loop)
    counted = classes.total() if nvidia else sum(classes[name] for name in VALU)
    share = elements / (compiled.target.warp_size * compiled.num_warps)
    widths = {
        kind: Counter(width(i.opcode) for i in loop if classify(i.opcode, table) == kind) for kind in ("load", "store")
    }
    return Stats(
        name=compiled.name,
        target=f"sm_{compiled.target.arch}" if nvidia else str(compiled.target.arch),
        per_element=round(counted / share, 2),
        elements_per_thread=share,
        classes=dict(classes),
        loads=dict(widths["load"]),
        stores=dict(widths["store"]),
        opcodes=dict(Counter(instruction.opcode for instruction in loop).most_common()),
        registers=compiled.registers,
        shared=compiled.shared,
        stack=compiled.stack,
        outside=len([i for i in code.instructions if i.opcode != "NOP"]) - len(loop),
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
    options: Mapping[str, Any] = field(default_factory=dict)


def kernels() -> Iterable[Job]:
    """The kernels the command line counts.

    To be filled in by whoever owns the list of generated kernels: import the generated modules inside this function
    (nothing of the project is imported at the top) and yield one `Job` for each kernel and plan.
    """
    return ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Count every kernel of `kernels()` on the chosen targets; 1 where one spills to local memory."""
    parser = argparse.ArgumentParser(description="Instructions per element of the generated kernels, without a GPU.")
    parser.add_argument("names", nargs="*", help="only the kernels whose name contains one of these")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all of them")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    parser.add_argument("--opcodes", action="store_true", help="also list the opcodes of the main loop")
    chosen = parser.parse_args(arguments)
    spilled = False
    for job in kernels():
        if chosen.names and not any(name in job.name for name in chosen.names):
            continue
        for target in job.targets:
            if chosen.target and target not in chosen.target:
                continue
            compiled = compile_for(
                job.fn,
                job.signature,
                job.constexprs,
                TARGETS[target],
                job.num_warps,
                aligned=job.aligned,
                **job.options,
            )
            stats = analyse(compiled, job.elements)
            spilled |= stats.stack > 0
            if chosen.json:
                print(json.dumps({"kernel": job.name, "triton": triton.__version__, **asdict(stats)}))
                continue
            print(job.name, stats)
            if chosen.opcodes:
                print("   ", "  ".join(f"{opcode}:{count}" for opcode, count in stats.opcodes.items()))
    return int(spilled)


if __name__ == "__main__":
    sys.exit(main())
