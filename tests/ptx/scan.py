"""A scan of the text of a compiled kernel, beside its execution.

A contraction may not change a bit of few numbers that happen to be tried, nor flushing any where none is subnormal.
"""

from __future__ import annotations

import re
from collections import Counter

_OPCODE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)", re.MULTILINE)


def opcodes(ptx: str) -> Counter[str]:
    """Count the instructions of a PTX text."""
    return Counter(_OPCODE.findall(ptx.split("{", 1)[-1]))


def of_ptx(ptx: str) -> list[str]:
    """Return the opcodes that strict maths does not have: those that flush, approximate, fuse, or that the assembler
    may fuse (an addition, subtraction or product that names no rounding)."""
    loose = r".*\.(ftz|approx|full)\b.*|(fma|mad)\..*f(16|32|64).*|(add|sub|mul)\.(ftz\.)?f(32|64)(x2|\.b?f16)?"
    return sorted(name for name in opcodes(ptx) if re.fullmatch(loose, name))


def of_fast_ptx(ptx: str) -> list[str]:
    """Return the opcodes that fast maths does not have either: exact operations that flush subnormals, which gradients
    and states may be; fp64; sums and products that are not rounded to nearest. It may fuse and approximate, and
    approximations and floors flush."""
    loose = r"(?!.*\.approx\b|cvt\.rmi\.).*\.ftz\b.*|.*\.f64\b.*|(add|sub|mul|fma)\.r[zmp]\..*"
    return sorted(name for name in opcodes(ptx) if re.fullmatch(loose, name))


def of_machine_code(ptx: str, listing: str) -> list[str]:
    """Return what the machine code (`nvdisasm -c`) of a strict kernel has that its PTX does not.

    Products and sums that are fused are an FADD less; where the assembler unrolls a loop there are more. From sm_100 on
    FADD2 adds two pairs, FHADD an fp16 number to an fp32 one (`add.rn.f32.f16`). Divisions and roots bring FFMA and
    FADD.FTZ, and nothing else may; absolute values and signs bring FADD of -RZ.
    """
    code = re.sub(r"FADD [^;]*, -RZ ;", "MOV ;", listing)
    made = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.FTZ)?)", code, re.M))
    asked = opcodes(ptx)
    sums = sum(n * (1 + name.endswith("x2")) for name, n in asked.items() if re.match(r"(add|sub)\..*f32", name))
    n = made["FADD"] + made["FHADD"] + made["UFADD"] + 2 * made["FADD2"]
    found = [] if n >= sums else [f"{n} FADD for {sums} additions"]
    refined = any(re.match(r"(div|sqrt|rcp|rsqrt)\..*f32", name) for name in asked)
    return found + [name for name in ("FFMA", "FFMA2", "UFFMA", "FHFMA", "FADD.FTZ") if made[name] and not refined]
