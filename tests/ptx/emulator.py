"""Execute PTX on the CPU: all threads of all programs of a launch at once, over NumPy arrays.

Threads have a block number each; the least one among those that may go on runs next, so that threads that parted meet
again at the first block that all of them pass. Addresses are those of this process. Checked on the way: an access is
aligned to its width and lies in live memory, a shuffle has all threads of its warps, a barrier all of its program; and,
where asked for, that no two programs, and no two warps between barriers, touch a byte that one of them writes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tests.ptx import instructions, text
from tests.ptx.instructions import BITS, DTYPES, Array, PTXError, raw
from tests.ptx.text import Statement, parts

LOWEST = 4096  # no address is lower
ALL = np.array([0xFFFFFFFF], np.uint32)  # threads of a warp
SHARED = np.uint64(1 << 60)  # where shared memory begins among the places that races are looked for at
BLOCKS = 1_000_000  # that a launch may go through: one that does not end is an error

_bytes = np.frombuffer((ctypes.c_uint8 * (2**47 - LOWEST)).from_address(LOWEST), np.uint8)
_HOST = {size: _bytes[: len(_bytes) // size * size].view(f"u{size}") for size in (1, 2, 4, 8)}
"""The memory of this process, by the size of an access."""

Ranges = tuple[Array, Array]
"""Where live memory begins and ends, uint64, ascending."""

Step = Callable[["Frame"], None]
Operand = Callable[["Frame"], Array]


class Frame:
    """The threads that run a block, and their registers as far as the block has used them.

    launch   the launch
    threads  their numbers; None where all run
    """

    def __init__(self, launch: Launch, threads: Array | None) -> None:
        self.launch, self.threads = launch, threads
        self.values: dict[str, Array] = launch.registers if threads is None else {}
        self.written: set[str] = set()
        self.lanes: Array = launch.lanes if threads is None else threads

    def get(self, name: str) -> Array:
        found = self.values.get(name)
        if found is None:
            found = self.launch.registers.get(name)
            if found is None:  # never written
                width = self.launch.kernel.text.width(name)
                found = np.array([0xDEADBEEFDEADBEEF & (2**width - 1)], np.uint64).astype(BITS[width])
            if self.threads is not None and len(found) > 1:
                found = found[self.threads]
            self.values[name] = found
        return found

    def put(self, name: str, bits: Array, mask: Array | None) -> None:
        self.values[name] = bits if mask is None else np.where(mask, bits, self.get(name))
        self.written.add(name)

    def spread(self, x: Array) -> Array:
        """An entry for each thread."""
        return np.broadcast_to(x, self.lanes.shape)

    def leave(self) -> None:
        """Write back what a part of the threads has in its registers."""
        if self.threads is None:
            return
        for name in self.written:
            new = self.values[name]
            old = self.launch.registers.get(name)
            whole = np.empty(self.launch.count, new.dtype)
            whole[:] = 0 if old is None else old
            whole[self.threads] = new
            self.launch.registers[name] = whole


class Kernel:
    """A kernel, whose blocks are decoded when they are first reached."""

    def __init__(self, ptx: str) -> None:
        self.text = text.read(ptx)
        self.name = self.text.name
        self._blocks: dict[int, list[Step]] = {}

    def block(self, k: int) -> list[Step]:
        """Return what the statements of a block do; raises PTXError for one that is not known."""
        found = self._blocks.get(k)
        if found is None:
            found = self._blocks[k] = [self._step(s, k) for s in self.text.blocks[k]]
        return found

    def run(self, grid: Sequence[int], arguments: Sequence[int | float], shared: int, **options: Any) -> None:
        """Run a launch; see `Launch`."""
        with np.errstate(all="ignore"):
            Launch(self, grid, arguments, shared, **options).run()

    def _step(self, s: Statement, block: int) -> Step:
        base = s.opcode.split(".")[0]
        if s.opcode == "bar.warp.sync":
            members = self._operand(s.operands[0], "b32")
            return lambda frame: frame.launch.whole_warps(frame, s, members(frame))
        if base in text.BRANCHES:
            return self._branch(s, base, block)
        if base in ("membar", "fence") or re.match(r"(cp\.async|wgmma)\.(fence|commit_group|wait_group)\b", s.opcode):
            return lambda frame: None  # programs run in step, and what may come later comes at once
        special = {"ld": self._load, "st": self._store, "shfl": self._shuffle, "redux": self._redux}
        special |= {"ldmatrix": self._matrix, "stmatrix": self._matrix, "mov": self._move}
        special |= {"cp": self._copy, "wgmma": self._product}
        if base in special:
            return special[base](s)
        if base == "setp" and s.opcode.endswith("16x2"):
            return self._compare_pairs(s)
        return self._value(s)

    # Operands

    def _operand(self, word: str, kind: str) -> Operand:
        dtype = DTYPES[kind]
        if word.startswith("%"):
            if special := re.fullmatch(r"%(tid|ctaid|ntid|nctaid)\.([xyz])|%laneid", word):
                return lambda frame: frame.launch.special(special[1] or "laneid", special[2], frame).view(dtype)
            width = self.text.width(word)
            narrow = BITS[8 * np.dtype(dtype).itemsize] if width > 8 * np.dtype(dtype).itemsize else None
            if narrow is not None:
                return lambda frame: frame.get(word).astype(narrow).view(dtype)
            if width > 1 and width < 8 * np.dtype(dtype).itemsize:
                raise PTXError(f"{self.name}: {word} is narrower than its use as {kind}")
            return (lambda frame: frame.get(word)) if width == 1 else (lambda frame: frame.get(word).view(dtype))
        value = self._constant(word, kind)
        return lambda frame: value

    def _constant(self, word: str, kind: str) -> Array:
        if word.startswith("global_smem"):  # where shared memory begins
            word = "0"
        if bits := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", word):
            return np.array([int(bits[1], 16)], f"u{len(bits[1]) // 2}").view(DTYPES[kind])
        if not re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", word):
            raise PTXError(f"{self.name}: operand {word!r}")
        width = 8 * np.dtype(DTYPES[kind]).itemsize
        value = int(word.rstrip("U"), 0)
        if kind == "pred":
            return np.array([value != 0])
        return np.array([value & (2**width - 1)], np.uint64).astype(BITS[width]).view(DTYPES[kind])

    def _guard(self, s: Statement) -> Callable[[Frame], Array | None]:
        if not s.guard:
            return lambda frame: None
        return lambda frame: ~frame.get(s.guard) if s.negated else frame.get(s.guard)

    def _put(self, name: str, kind: str, guard: Callable[[Frame], Array | None]) -> Callable[[Frame, Array], None]:
        """Return how a result of that type gets into a register, which may be wider."""
        if name == "_":
            return lambda frame, value: None
        dtype = np.dtype(DTYPES[kind])
        wide = BITS[self.text.width(name)]
        if wide.itemsize == dtype.itemsize:
            return lambda frame, value: frame.put(name, raw(value), guard(frame))
        if wide.itemsize < dtype.itemsize or dtype.kind not in "ui":
            raise PTXError(f"{self.name}: {name} is no register for {kind}")
        through = np.dtype(f"{dtype.kind}{wide.itemsize}")
        return lambda frame, value: frame.put(name, raw(value.astype(through)), guard(frame))

    def _address(self, word: str) -> Operand:
        found = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", word)
        if found is None:
            raise PTXError(f"{self.name}: address {word!r}")
        wide = not found[1].startswith("%") or self.text.width(found[1]) == 64
        base, offset = self._operand(found[1], "u64" if wide else "u32"), np.uint64(int(found[2] or 0) & (2**64 - 1))
        return lambda frame: base(frame).astype(np.uint64) + offset

    # Instructions

    def _value(self, s: Statement) -> Step:
        """A row of the table."""
        row = instructions.find(s.opcode)
        if len(s.operands) == 4 and re.fullmatch(r"(min|max)(\.NaN)?\.f32", s.opcode):  # of three, from sm_100 on
            two = row.function
            row = instructions.Row(("f32",) * 3, "f32", lambda a, b, c: two(two(a, b), c))
        if len(s.operands) != 1 + len(row.takes):
            raise PTXError(f"{self.name}: operands of {s.text}")
        operands = [self._operand(word, kind) for word, kind in zip(s.operands[1:], row.takes, strict=True)]
        put = self._put(s.operands[0], row.gives, self._guard(s))
        return lambda frame: put(frame, row(*(operand(frame) for operand in operands)))

    def _compare_pairs(self, s: Statement) -> Step:
        """setp of both halves of packed numbers, with a predicate for each (ISA 9.7.7)."""
        row = instructions.find(s.opcode.removesuffix("x2"))
        if len(s.operands) != 4:
            raise PTXError(f"{self.name}: operands of {s.text}")
        puts = [self._put(name, "pred", self._guard(s)) for name in s.operands[:2]]
        packed = [self._operand(word, "b32") for word in s.operands[2:]]

        def compare(frame: Frame) -> None:
            bits = [x(frame) for x in packed]
            for by, put in zip((0, 16), puts, strict=True):
                put(frame, row(*((x >> np.uint32(by)).astype(np.uint16) for x in bits)))

        return compare

    def _move(self, s: Statement) -> Step:
        """mov; also of a vector of registers into one of their joint width, and back."""
        vectors = [word.startswith("{") for word in s.operands]
        if not any(vectors):
            return self._value(s)
        inner = parts(s.operands[vectors.index(True)].strip("{} "))
        width = int(s.opcode[5:])
        part, guard = width // len(inner), self._guard(s)
        if vectors[0]:
            whole = self._operand(s.operands[1], f"b{width}")
            puts = [self._put(name, f"b{part}", guard) for name in inner]

            def split(frame: Frame) -> None:
                bits = whole(frame)
                for k, put in enumerate(puts):
                    put(frame, (bits >> bits.dtype.type(part * k)).astype(BITS[part]))

            return split
        operands = [self._operand(word, f"b{part}") for word in inner]
        put = self._put(s.operands[0], f"b{width}", guard)

        def join(frame: Frame) -> None:
            wide = BITS[width]
            bits = operands[0](frame).astype(wide)
            for k, operand in enumerate(operands[1:], 1):
                bits = bits | (operand(frame).astype(wide) << wide.type(part * k))
            put(frame, bits)

        return join

    def _branch(self, s: Statement, base: str, block: int) -> Step:
        after, end = block + 1, len(self.text.blocks)
        if base in ("bar", "barrier"):
            if s.guard or s.opcode not in ("bar.sync", "barrier.sync") or s.operands != ("0",):
                raise PTXError(f"{self.name}: {s.text}")
            return lambda frame: frame.launch.wait(frame.lanes, after)
        target = end
        if base == "bra":
            if s.operands[0] not in self.text.labels:
                raise PTXError(f"{self.name}: {s.text}")
            target = self.text.labels[s.operands[0]]
        guard = self._guard(s)

        def go(frame: Frame) -> None:
            taken = guard(frame)
            frame.launch.places[frame.lanes] = target if taken is None else np.where(taken, target, after)

        return go

    def _memory(self, s: Statement) -> tuple[str, str, list[str]]:
        """Return (space, type, registers) of a load or a store."""
        _, *words, kind = s.opcode.split(".")
        for_performance = r"L[12]::\w+|volatile|relaxed|weak|nc|v[248]|global|shared|param"
        if not all(re.fullmatch(for_performance, w) for w in words) or "L2::cache_hint" in words:
            raise PTXError(f"{self.name}: unknown instruction {s.opcode}")
        space = next(w for w in words if w in ("global", "shared", "param"))
        vector = s.operands[0] if s.opcode.startswith("ld") else s.operands[1]
        return space, kind, parts(vector.strip("{} "))

    def _load(self, s: Statement) -> Step:
        space, kind, names = self._memory(s)
        guard, dtype = self._guard(s), np.dtype(DTYPES[kind])
        puts = [self._put(name, kind, guard) for name in names]
        if space == "param":
            name = s.operands[1].strip("[] ")
            if name not in self.text.params or len(puts) != 1:
                raise PTXError(f"{self.name}: {s.text}")
            return lambda frame: puts[0](frame, frame.launch.argument(name, dtype))
        address = self._address(s.operands[1])

        def load(frame: Frame) -> None:
            mask = guard(frame)
            for put, value in zip(
                puts, frame.launch.load(space, address(frame), dtype, len(puts), mask, frame, s), strict=True
            ):
                put(frame, value)

        return load

    def _store(self, s: Statement) -> Step:
        space, kind, names = self._memory(s)
        guard, address = self._guard(s), self._address(s.operands[0])
        operands = [self._operand(name, kind) for name in names]

        def store(frame: Frame) -> None:
            values = [raw(operand(frame)) if kind[0] != "f" else operand(frame).view(BITS[int(kind[1:])])
                      for operand in operands]  # fmt: skip
            frame.launch.store(space, address(frame), values, guard(frame), frame, s)

        return store

    def _shuffle(self, s: Statement) -> Step:
        """shfl.sync.mode.b32 d, a, b, c, mask (ISA 9.7.9.6), within whole warps."""
        found = re.fullmatch(r"shfl\.sync\.(bfly|idx|up|down)\.b32", s.opcode)
        if found is None or len(s.operands) != 5 or s.guard:
            raise PTXError(f"{self.name}: {s.text}")
        a, b, c, members = (self._operand(word, "b32") for word in s.operands[1:])
        put = self._put(s.operands[0], "b32", self._guard(s))
        lane = np.arange(32)

        def shuffle(frame: Frame) -> None:
            frame.launch.whole_warps(frame, s, members(frame))
            values, by, how = (frame.spread(x(frame)).reshape(-1, 32) for x in (a, b, c))
            by, segment, clamp = by.astype(np.int64) & 31, how.astype(np.int64) >> 8 & 31, how.astype(np.int64) & 31
            low, high = lane & segment, (lane & segment) | (clamp & ~segment)
            source = {"bfly": lane ^ by, "idx": low | (by & ~segment), "up": lane - by, "down": lane + by}[found[1]]
            inside = source >= high if found[1] == "up" else source <= high
            put(frame, np.take_along_axis(values, np.where(inside, source, lane), 1).reshape(-1))

        return shuffle

    def _redux(self, s: Statement) -> Step:
        found = re.fullmatch(r"redux\.sync\.((?:add|min|max|and|or|xor)(?:\.NaN)?)\.([usbf]32)", s.opcode)
        if found is None or len(s.operands) != 3 or s.guard:
            raise PTXError(f"{self.name}: {s.text}")
        members = self._operand(s.operands[2], "b32")
        function = instructions.find(f"{found[1]}.{found[2]}").function
        a, put = self._operand(s.operands[1], found[2]), self._put(s.operands[0], found[2], self._guard(s))

        def combine(frame: Frame) -> None:
            frame.launch.whole_warps(frame, s, members(frame))
            warps = frame.spread(a(frame)).reshape(-1, 32)
            put(frame, np.repeat(reduce(function, warps.T), 32))

        return combine

    def _matrix(self, s: Statement) -> Step:
        """ldmatrix and stmatrix (ISA 9.7.14.5.15): 8 x 8 matrices of 16 bits in shared memory, rows by address."""
        found = re.fullmatch(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", s.opcode)
        if found is None or s.guard:
            raise PTXError(f"{self.name}: {s.text}")
        loads = found[1] == "ld"
        vector, address = s.operands if loads else reversed(s.operands)
        names, at = parts(vector.strip("{} ")), self._address(address)
        lane, no_guard = np.arange(32), self._guard(s)
        puts = [self._put(name, "b32", no_guard) for name in names] if loads else []
        values = [] if loads else [self._operand(name, "b32") for name in names]

        def move(frame: Frame) -> None:
            frame.launch.whole_warps(frame, s, ALL)
            every = frame.spread(at(frame)).reshape(-1, 32)
            for k in range(len(names)):
                halves = []
                bits = values[k](frame) if values else None
                for half in (0, 1):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    row, column = (column, row) if found[3] else (row, column)
                    place = (every[:, 8 * k + row] + (2 * column).astype(np.uint64)).reshape(-1)
                    if bits is None:
                        halves += frame.launch.load("shared", place, np.dtype(np.uint16), 1, None, frame, s)
                    else:
                        word = frame.spread((bits >> np.uint32(16 * half)).astype(np.uint16))
                        frame.launch.store("shared", place, [word], None, frame, s)
                if loads:
                    puts[k](frame, halves[0].astype(np.uint32) | (halves[1].astype(np.uint32) << np.uint32(16)))

        return move


    def _copy(self, s: Statement) -> Step:
        """cp.async of 16 bytes to shared memory, or of zeros (ISA 9.7.9.25.3)."""
        if s.opcode != "cp.async.cg.shared.global" or len(s.operands) != 4 or int(s.operands[2], 0) != 16:
            raise PTXError(f"{self.name}: {s.text}")
        to, source = map(self._address, s.operands[:2])
        size = self._operand(s.operands[3], "u32")
        guard, word = self._guard(s), np.dtype(np.uint32)

        def copy(frame: Frame) -> None:
            mask, some = guard(frame), size(frame) == 16
            if (~some & (size(frame) != 0)).any():
                raise PTXError(f"{self.name}: part of 16 bytes at {s.text}")
            taken = some if mask is None else some & mask
            values = frame.launch.load("global", source(frame), word, 4, taken, frame, s)
            frame.launch.store("shared", to(frame), values, mask, frame, s)

        return copy

    def _product(self, s: Statement) -> Step:
        """wgmma.mma_async of bf16 in shared memory, whose rows lie along the sum, 128 bytes each (ISA 9.7.15)."""
        found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", s.opcode)
        if found is None or s.guard or s.operands[4:] != ("1", "1", "0", "0"):
            raise PTXError(f"{self.name}: {s.text}")
        names, columns, lane = parts(s.operands[0].strip("{} ")), int(found[1]), np.arange(128)
        left, right = (self._operand(word, "b64") for word in s.operands[1:3])
        adds = self._operand(s.operands[3], "pred")
        held, puts = [self._operand(x, "f32") for x in names], [self._put(x, "f32", self._guard(s)) for x in names]
        entry = np.arange(len(names))[:, None]
        row = lane // 32 * 16 + lane % 32 // 4 + entry // 2 % 2 * 8
        column = entry // 4 * 8 + lane % 4 * 2 + entry % 2

        def product(frame: Frame) -> None:
            frame.launch.whole_warps(frame, s, ALL)
            groups = frame.lanes.reshape(-1, 128)
            if (groups != groups[:, :1] + lane).any() or (groups[:, 0] % 128).any():
                raise PTXError(f"{self.name}: threads of four warps are missing at {s.text}")
            a, b = (frame.launch.tile(frame.spread(x(frame))[::128], groups[:, 0], rows, s)
                    for x, rows in ((left, 64), (right, columns)))  # fmt: skip
            made = (a @ b.swapaxes(1, 2))[:, row, column].swapaxes(0, 1).reshape(len(names), -1)
            kept = frame.spread(adds(frame))
            for k, put in enumerate(puts):
                put(frame, (made[k] + np.where(kept, frame.spread(held[k](frame)), 0)).astype(np.float32))

        return product


class Launch:
    """One launch of a kernel.

    arguments  the values of its parameters; those that follow are 0
    shared     bytes of shared memory of a program
    live       returns where memory is live; True asks to look again
    races      whether to look for races
    """

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], arguments: Sequence[int | float], shared: int,
        live: Callable[[bool], Ranges] | None = None, races: bool = False,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.programs = grid[0] * grid[1] * grid[2]
        self.count = self.programs * kernel.text.threads
        self.lanes = np.arange(self.count)
        self.registers: dict[str, Array] = {}
        self.places = np.zeros(self.count, np.int32)
        self.waiting = np.zeros(self.count, bool)
        self.shared = -(-max(shared, 16) // 16) * 16
        room = np.full(self.programs * self.shared, 0xA5, np.uint8)
        self.rooms = {size: room.view(f"u{size}") for size in (1, 2, 4, 8)}
        self.live = live
        self.touched: list[tuple[Array, Array, Array, Array, int, Array | None]] | None = [] if races else None
        self.epochs = np.zeros(self.programs, np.int64)

    def run(self) -> None:
        end = len(self.kernel.text.blocks)
        for _ in range(BLOCKS):
            ready = np.where(self.waiting, end, self.places)
            place = int(ready.min())
            if place >= end:
                if not self.waiting.any():
                    return self._races()
                self._pass_barrier(end)
                continue
            chosen = ready == place
            frame = Frame(self, None if chosen.all() else np.flatnonzero(chosen))
            self.places[frame.lanes] = place + 1
            for step in self.kernel.block(place):
                step(frame)
            frame.leave()
        raise PTXError(f"{self.kernel.name} does not end")

    def wait(self, lanes: Array, after: int) -> None:
        self.places[lanes], self.waiting[lanes] = after, True

    def _pass_barrier(self, end: int) -> None:
        """Let the programs go on whose threads wait, all at one barrier."""
        waiting, places = self.waiting.reshape(self.programs, -1), self.places.reshape(self.programs, -1)
        there = waiting.any(1)
        if not waiting[there].all() or (places[there] != places[there][:, :1]).any():
            raise PTXError(f"{self.kernel.name}: threads of a program are missing at a barrier")
        self.epochs += there
        self.waiting[:] = False

    def whole_warps(self, frame: Frame, s: Statement, members: Array) -> None:
        """Raise PTXError unless all threads of warps take part in an instruction, as its mask of them says."""
        first = frame.lanes[::32]
        whole = len(frame.lanes) == 32 * len(first) and not (first % 32).any() and (members == ALL).all()
        if not whole or (frame.lanes.reshape(-1, 32) != first[:, None] + np.arange(32)).any():
            raise PTXError(f"{self.kernel.name}: threads of a warp are missing at {s.text}")

    def special(self, name: str, axis: str, frame: Frame) -> Array:
        threads, (x, y, _) = self.kernel.text.threads, self.grid
        program, k = frame.lanes // threads, "xyz".index(axis or "x")
        if name in ("ntid", "nctaid"):
            found = np.array([(threads, 1, 1)[k] if name == "ntid" else self.grid[k]])
        elif name == "ctaid":
            found = (program % x, program // x % y, program // x // y)[k]
        elif name == "tid":
            found = frame.lanes % threads if k == 0 else np.array([0])
        else:
            found = frame.lanes % 32
        return found.astype(np.uint32)

    def argument(self, name: str, dtype: Any) -> Array:
        k = self.kernel.text.params.index(name)
        value = self.arguments[k] if k < len(self.arguments) else 0
        if isinstance(value, float):
            return np.array([value], np.float32).view(BITS[32]).view(dtype)
        return np.array([int(value) & (2**64 - 1)], np.uint64).astype(BITS[8 * dtype.itemsize]).view(dtype)

    # Memory

    def _placed(
        self, space: str, at: Array, size: int, count: int, mask: Array | None, frame: Frame, s: Statement,
        stored: Sequence[Array] = (),
    ) -> tuple[Any, Array, Any]:  # fmt: skip
        """Check the addresses of an access; return (memory, index of the first part, which of the threads take part).

        A load from one address for all threads is done once.
        """
        alone = len(at) == 1 and mask is None and space == "global" and self.touched is None and not stored
        lanes = frame.lanes
        selected: Any = slice(None)
        if not alone:
            at = frame.spread(at)
            if mask is not None:
                selected = np.flatnonzero(frame.spread(mask))
                at, lanes = at[selected], lanes[selected]
        width = size * count
        if (at & np.uint64(width - 1)).any():
            raise PTXError(f"{self.kernel.name}: an address is no multiple of {width} bytes at {s.text}")
        if space == "shared":
            if (at + np.uint64(width) > self.shared).any():
                raise PTXError(f"{self.kernel.name}: outside shared memory at {s.text}")
            at = at + (lanes // self.kernel.text.threads * self.shared).astype(np.uint64)
        elif self.live is not None and len(at):
            self._check(at, width, s)
        if self.touched is not None:
            program = lanes // self.kernel.text.threads
            key = at if space == "global" else at | SHARED
            written = np.stack([frame.spread(x)[selected] for x in stored], 1).view(np.uint8) if stored else None
            self.touched.append((key, program, lanes // 32, self.epochs[program], width, written))
        memory, origin = (_HOST, LOWEST) if space == "global" else (self.rooms, 0)
        return memory[size], ((at - np.uint64(origin)) // np.uint64(size)).astype(np.int64), selected

    def tile(self, descriptor: Array, lanes: Array, rows: int, s: Statement) -> Array:
        """Return (groups, rows, 16) in fp64: bf16 in shared memory, swizzled within 1024 bytes as descriptors say."""
        if (descriptor >> np.uint64(62) != 1).any() or (descriptor >> np.uint64(49) & np.uint64(7)).any():
            raise PTXError(f"{self.kernel.name}: rows of other than 128 bytes at {s.text}")
        begin, stride = ((descriptor >> np.uint64(k) & np.uint64(0x3FFF)) << np.uint64(4) for k in (0, 32))
        row, k = np.arange(rows)[:, None], np.arange(16)
        at = (begin[:, None, None] + stride[:, None, None] * (row // 8) + row % 8 * 128 + 2 * k).astype(np.int64)
        at ^= (at >> 7 & 7) << 4
        if (at + 2 > self.shared).any():
            raise PTXError(f"{self.kernel.name}: outside shared memory at {s.text}")
        at += (lanes // self.kernel.text.threads * self.shared)[:, None, None]
        bits = self.rooms[2][at // 2].astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).astype(np.float64)

    def _check(self, at: Array, width: int, s: Statement) -> None:
        for again in (False, True):  # what was known before is looked at first
            begins, ends = self.live(again)  # type: ignore[misc]
            k = np.searchsorted(begins, at, side="right") - 1
            outside = (k < 0) | (at + np.uint64(width) > ends[np.maximum(k, 0)])
            if not outside.any():
                return
        raise PTXError(f"{self.kernel.name}: {int(outside.sum())} threads are out of bounds at {s.text}")

    def load(
        self, space: str, at: Array, dtype: Any, count: int, mask: Array | None, frame: Frame, s: Statement
    ) -> list[Array]:
        memory, index, selected = self._placed(space, at, dtype.itemsize, count, mask, frame, s)
        found = []
        for k in range(count):
            value = memory[index + k]
            if not isinstance(selected, slice):
                whole = np.zeros(len(frame.lanes), memory.dtype)
                whole[selected] = value
                value = whole
            found.append(value.view(dtype))
        return found

    def store(
        self, space: str, at: Array, values: Sequence[Array], mask: Array | None, frame: Frame, s: Statement
    ) -> None:
        memory, index, selected = self._placed(space, at, values[0].itemsize, len(values), mask, frame, s, values)
        for k, value in enumerate(values):
            memory[index + k] = frame.spread(value)[selected]

    def _races(self) -> None:
        """Raise PTXError where programs, or warps of one between two barriers, touch a byte that one of them writes.

        Warps that hold the same values may all write them to shared memory.
        """
        if not self.touched:
            return
        shared = self._shared_lines(self.touched)
        if not len(shared):
            return
        columns: list[list[Array]] = [[], [], [], [], []]
        for at, program, warp, epoch, width, written in self.touched:
            line = at >> np.uint64(4)
            near = np.flatnonzero(shared[np.searchsorted(shared, line) % len(shared)] == line)
            for byte in range(width) if len(near) else ():
                value = np.full(len(near), -1) if written is None else written[near, byte].astype(np.int64)
                parts = (at[near] + np.uint64(byte), program[near], warp[near], epoch[near], value)
                for column, part in zip(columns, parts, strict=True):
                    column.append(part)
        at, program, warp, epoch, value = map(np.concatenate, columns)
        kept = np.isin(at, np.unique(at[value >= 0]))
        at, program, warp, epoch, value = (x[kept] for x in (at, program, warp, epoch, value))
        for what, keys, actor in (
            ("programs", (at,), program), ("warps between barriers", (at, program.astype(np.uint64), epoch), warp),
        ):  # fmt: skip
            order = np.lexsort(keys)
            new = np.zeros(len(order), bool)
            new[:1] = True
            for key in keys:
                new[1:] |= key[order][1:] != key[order][:-1]
            first = np.flatnonzero(new)
            if not len(first):
                return
            (least, most), (low, high) = (
                [f.reduceat(x[order], first) for f in (np.minimum, np.maximum)] for x in (actor, value)
            )
            bad = (least != most) & (high >= 0) & ((low != high) | (at[order][first] < SHARED))
            if bad.any():
                raise PTXError(f"{self.kernel.name}: {what} race for {int(bad.sum())} bytes")

    @staticmethod
    def _shared_lines(touched: Sequence[Any]) -> Array:
        """Return the lines of 16 bytes, which hold a whole access each, that several warps touch and one writes."""
        line = np.concatenate([x[0] >> np.uint64(4) for x in touched])
        warp = np.concatenate([x[2] for x in touched])
        wrote = np.repeat([x[5] is not None for x in touched], [len(x[0]) for x in touched])
        order = np.argsort(line)
        line, warp, wrote = line[order], warp[order], wrote[order]
        first = np.flatnonzero(np.concatenate([[True], line[1:] != line[:-1]])) if len(line) else order
        several = np.minimum.reduceat(warp, first) != np.maximum.reduceat(warp, first) if len(line) else order > 0
        return line[first][several & np.logical_or.reduceat(wrote, first)] if len(line) else line
