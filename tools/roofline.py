"""Predict from machine code how much of a device's memory speed a kernel reaches, without a device.

A sweep takes at least the time that memory moves its bytes, that each pipe of a processor is busy, and that its
programs take one after the other where they are too few to fill the device. Rates are those of compute capability 9
(CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"), per scheduler and warp: one instruction is
issued per cycle; FMA takes a cycle for fp32 and two for integers, ALU two, XU (functions, conversions) eight, LSU four
for each 32 bits of a lane. Latencies are round figures of published microbenchmarks; nothing here was measured.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

TARGET = "sm_90"
"""The target of kernel_stats whose rates these are."""

MOST = 0.95
"""The share of the time that an H200's memory takes for which a pipe may be busy."""

KNOWN: Mapping[str, float] = {
    "adadelta.int8_split24": 1.27, "adahessian.int8_split24": 1.08, "adai.int8_split24.4": 1.06,
    "adalite.int8_split24.19": 1.14, "adalite.int8_split24.19_few": 1.25, "adalite.int8_split24.7_few": 1.33,
    "adam_atan2.int8_split24": 1.15, "adam_mini.int8_split24.1_few": 0.98, "adamg.int8_split24": 1.42,
    "adamp.int8_split24.1": 1.02,
    "adamp.int8_split24.1_few": 1.25, "adamuon.int8_split24.1": 1.0, "adamw.bnb8": 1.91, "adamw.flashoptim": 1.05,
    "adamw.int4_factored_split24.2_few": 1.06, "adamw.int4_split24": 1.07, "adamw.int5_factored_split24.2_few": 1.06,
    "adamw.int5_split24": 1.22, "adamw.int6_split24": 1.18,
    "adamw.int8_split24.float16": 1.06, "adamw.lpmm4.1_few": 1.18, "adamw.lpmm4_factor.2_few": 1.06,
    "adamw.lpmm4_factor.7": 1.12, "adamw.torchao4": 1.32, "adamw.torchao8": 1.92, "adamw.torchao_fp8": 1.21,
    "adamod.int8_split24": 0.96, "adan.int8_split24": 1.0, "adashift.int8_split24.1": 1.12,
    "adasmooth.int8_split24": 1.05, "apollo_qn.int8_split24.1": 1.48, "came.int8_split24.10": 1.03,
    "came.int8_split24.10_few": 1.22, "cautious_adamw.int8_split24.1": 1.32, "cautious_lion.int8_split24.1": 1.04,
    "dadapt_adam.int8_split24.2": 0.98, "dadapt_adam.int8_split24.2_few": 1.0, "dadapt_adan.int8_split24.2": 1.08,
    "dadapt_adan.int8_split24.2_few": 1.09, "diffgrad.int8_split24": 1.16, "exadam.int8_split24": 1.03,
    "ftrl.int8_split24": 0.97, "grokfast_adamw.int8_split24": 0.96,
    "kate.int8_split24": 1.43, "padam.int8_split24": 1.37, "prodigy.int8_split24.5": 1.05, "racs.int8_split24.4": 1.18,
    "racs.int8_split24.4_few": 1.33, "sadam.int8_split24": 1.71, "sgdf.int8_split24": 0.98, "soap.int8_split24.3": 0.97,
    "spam.int8_split24": 0.96, "stable_adamw.int8_split24.1": 1.14, "stable_adamw.int8_split24.1_few": 1.14,
    "vradam.int8_split24.1": 1.03, "vradam.int8_split24.1_few": 1.06, "vsgd.int8_split24": 1.16,
}  # fmt: skip
"""Sweeps of which one pipe is busy for longer, and for which share."""

SPILLING = (
    "acprop.int8_split24", "adadelta.int8_split24", "adamw.int4_factored_split24.7", "adamw.int5_factored_split24.7",
    "adamw.torchao_fp8", "apollo_qn.int8_split24.3", "apollo_qn.int8_split24.3_few", "kate.int8_split24",
    "rprop.int8_split24", "sadam.int8_split24", "sgdf.int8_split24", "shampoo.int8_split24.1", "soap.int8_split24.3",
    "soap_muon.int8_split24.15_few", "soap_muon.int8_split24.2_few",
)  # fmt: skip
"""Sweeps that spill in the registers that are planned for them, and so are compiled again at the first step."""

SCHEDULERS = 4
"""Schedulers of a processor."""

LATENCY = {"load": 800, "LSU": 28, "XU": 24, "ALU": 5, "FMA": 5, "issue": 12}
"""Cycles from the issue of an instruction to its result; a load is from memory that is in use."""

_PIPES = (
    ("XU", r"MUFU|POPC|FLO|BREV|(F2I|I2F|FRND|F2F|I2I)\b"),
    ("FMA", r"FADD|FMUL|FFMA|IMAD|IMUL|HFMA2|HADD2|HMUL2"),
    ("LSU", r"(LDG|LD|STG|ST|LDS|STS|LDSM|STSM|LDL|STL|ATOMS|SHFL|REDUX)\b"),
    ("issue", r"(U[A-Z]|R2UR|S2UR|S2R|VOTEU|LDC|BAR|BRA|BSSY|BSYNC|EXIT|WARPSYNC|DEPBAR|CALL|RET|BREAK)"),
    ("ALU", r""),
)


class Instruction(Protocol):
    """An opcode with its modifiers, and the operands as text."""

    @property
    def opcode(self) -> str: ...
    @property
    def operands(self) -> str: ...


@dataclass(frozen=True)
class Card:
    """A device: processors, cycles per second under load, bytes per second of a copy."""

    processors: int
    clock: float
    bandwidth: float

    def slots(self, registers: int, warps: int) -> int:
        """Return how many programs are resident at a time."""
        of_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
        return self.processors * max(min(32, 64 // warps, of_registers), 1)


MATRIX: Sequence[tuple[int, int]] = ((4096, 4096),)
GPT2 = ((50257, 768), (1024, 768), *((768, 2304), (768, 768), (768, 3072), (3072, 768)) * 12)
"""Matrices that are stepped alone, and those of GPT-2."""

# Both have the same chip; H100: SXM, HBM3.
CARDS: Mapping[str, Card] = {"H100": Card(132, 1.755e9, 3.0e12), "H200": Card(132, 1.755e9, 4.3e12)}


@dataclass(frozen=True)
class Cost:
    """The cost of a kernel whose programs each do one full work item.

    launched  instructions per element of a thread, with what a program does before and behind its loop
    pipes     cycles of a scheduler per element of a thread, by pipe
    alone     cycles of one warp that nothing disturbs
    grain     rows and columns of the matrix that a program takes; one row: so many elements of any tensor
    """

    launched: float
    pipes: dict[str, float]
    alone: float
    grain: tuple[int, int]
    registers: int
    warps: int

    def busy(self, card: Card, bytes: float) -> dict[str, float]:
        """Return the share of the time that memory takes in which each pipe is busy."""
        rate = card.processors * SCHEDULERS * 32 * card.clock * bytes / card.bandwidth
        return {name: round(cycles / rate, 3) for name, cycles in self.pipes.items()}

    def share(self, card: Card, bytes: float, shapes: Sequence[tuple[int, int]] = ()) -> float:
        """Return the predicted share of a copy's speed: of many programs, or of those of some matrices."""
        busiest = max(1.0, *self.busy(card, bytes).values())
        if not shapes:
            return 1 / busiest
        rows, columns = self.grain
        if rows == 1:
            programs = sum(-(-math.prod(shape) // columns) for shape in shapes)
        else:
            programs = sum(-(-n // rows) * -(-m // columns) for n, m in shapes)
        memory = sum(map(math.prod, shapes)) * bytes / card.bandwidth
        # Few programs leave schedulers without a warp, or one with more than another.
        warps, schedulers = programs * self.warps, card.processors * SCHEDULERS
        pipes = max(self.busy(card, bytes).values()) * memory * -(-warps // schedulers) * schedulers / warps
        waves = -(-programs // card.slots(self.registers, self.warps))
        return memory / max(memory, pipes, waves * self.alone / card.clock)


def pipe(opcode: str) -> tuple[str, int]:
    """Return the pipe of an opcode, and the cycles for which a warp's instruction takes it.

    >>> [pipe(opcode) for opcode in ("FFMA", "IMAD.U32", "MUFU.RSQ", "LDG.E.128", "ULEA", "LOP3.LUT", "F2FP.BF16")]
    [('FMA', 1), ('FMA', 2), ('XU', 8), ('LSU', 16), ('issue', 1), ('ALU', 2), ('ALU', 2)]
    """
    name = next(name for name, pattern in _PIPES if re.match(pattern, opcode))
    if name == "LSU":
        wide = re.search(r"\.(64|128|256)\b", opcode)
        return name, 4 * (int(wide[1]) // 32 if wide else 1)
    return name, {"XU": 8, "ALU": 2, "FMA": 2 if opcode.startswith("I") else 1, "issue": 1}[name]


def _registers(instruction: Instruction) -> tuple[set[str], set[str]]:
    """Return (written, read) registers and predicates."""
    opcode = instruction.opcode
    parts = re.split(r",\s*", instruction.operands)
    stores = opcode.startswith(("ST", "RED.", "BAR", "BRA", "EXIT"))
    to = 0 if stores else 1 + (len(parts) > 1 and bool(re.match(r"!?U?P(\d|T)|R\d", parts[0]))
                               and bool(re.match(r"U?P\d|U?PT$", parts[1]) or opcode.startswith("SHFL")))  # fmt: skip
    wide = re.search(r"\.(64|128|256|WIDE)\b", opcode)
    each = {"64": 2, "128": 4, "256": 8, "WIDE": 2}[wide[1]] if wide else 1

    def named(some: Iterable[str], each: int) -> set[str]:
        found = set()
        for kind, number, pair in re.findall(r"\b(U?[RP])(\d+)\b(\.64)?", " ".join(some)):
            found |= {f"{kind}{int(number) + k}" for k in range(max(each if kind == "R" else 1, 2 if pair else 1))}
        return found

    read = named(parts[to:-1], 1) | named(parts[-1:], each) if stores and each > 1 else named(parts[to:], 1)
    return named(parts[:to], each), read


def cycles(*stretches: Sequence[Instruction]) -> int:
    """Return the cycles until a warp alone has issued these instructions, in order, one stretch after the other."""
    ready: dict[str, int] = {}
    free: dict[str, int] = {}
    clock = 0
    known: dict[int, tuple[str, int, int, set[str], set[str]]] = {}
    for instruction in (i for stretch in stretches for i in stretch):
        if id(instruction) not in known:
            name, taken = pipe(instruction.opcode)
            late = LATENCY["load" if re.match(r"LDG|LD\b", instruction.opcode) else name]
            known[id(instruction)] = (name, taken, late, *_registers(instruction))
        name, taken, late, written, read = known[id(instruction)]
        clock = max(clock + 1, free.get(name, 0), *(ready.get(x, 0) for x in read | written))
        free[name] = clock + (taken if name != "LSU" else taken // SCHEDULERS)
        for x in written:
            ready[x] = clock + late
    return clock


def cost(
    code: Sequence[Instruction], loops: Sequence[range], main: range, times: int, share: float, grain: tuple[int, int],
    registers: int, warps: int,
) -> Cost:  # fmt: skip
    """Return the cost of a kernel.

    loops  ranges of backward branches; main: that which is done `times` times, the others are not done
    share  elements of a thread in one round of it
    """
    others = [x for x in loops if x.stop <= main.start or x.start >= main.stop]
    end = max((k for k, i in enumerate(code) if i.opcode.startswith("EXIT")), default=len(code))
    once = [k for k in range(end + 1) if not any(k in x for x in (*others, main)) and k < len(code)]
    body = [code[k] for k in main]
    before, behind = ([code[k] for k in once if (k < main.start) == early] for early in (True, False))
    done: Counter[str] = Counter(issue=len(once) + times * len(body))
    for stretch, count in ((before, 1), (body, times), (behind, 1)):
        for i in stretch:
            name, taken = pipe(i.opcode)
            done[name] += taken * count if name != "issue" else 0
    few = min(times, 4)  # rounds are alike: the last ones say what each takes
    first, last = cycles(before, *[body] * (few - 1), behind), cycles(before, *[body] * few, behind)
    each = share * times
    return Cost(
        launched=round(done["issue"] / each, 2),
        pipes={name: round(value / each, 3) for name, value in done.items()},
        alone=math.floor(last + (times - few) * (last - first)),
        grain=grain,
        registers=registers,
        warps=warps,
    )
