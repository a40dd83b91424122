"""Formats lowered alone: the functions of a plan's codecs, free of any rule.

A codec function sees one value: its fields (the buffers CODE and the suffixes), the value itself (X), or the root of
a second moment (ROOT).  Random bits are `draw` leaves: which word and which of its bits they are is known where a rule
and a plan meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from optgen.formats.format import Field, Format, Master, Noise
from optgen.ir import node as ir
from optgen.ir.program import Buffer, Let, Program, Store
from optgen.lang.values import Num, Value
from optgen.lower.naming import Recorder
from optgen.lower.program import block_of, buffer_of, read
from optgen.ops import dtypes, spaces
from optgen.ops.dtypes import DType


@dataclass(frozen=True)
class Drawn(Noise):
    """Noise as a codec asks for it: leaves instead of bits of a word."""

    word: Num = None
    shift: int = 0
    bits: int = 0

    def integer(self) -> Num:
        return Value(ir.draw("integer", self.bits, self.bits))

    def fraction(self, width: int) -> Num:
        return Value(ir.draw("fraction", self.bits, width))

    def middle(self, width: int) -> Num:
        return Value(ir.draw("middle", self.bits, width))


CODE, X, ROOT, UNROUNDED = "code", "x", "root", "unrounded"
"""Buffers of codec programs: the field without a suffix, the fp32 value, the root that is read back of it, and that of
the value itself."""


@dataclass(frozen=True)
class CodecPrograms:
    """The programs of one format.

    fields   suffix -> field, in storage order
    decode   fields -> X
    root     fields -> ROOT, for formats of nonnegative values
    encode   X -> fields (ROOT, UNROUNDED) with random bits; None for formats that round to nearest
    nearest  X -> fields (ROOT, UNROUNDED), rounded to nearest
    """

    fields: Mapping[str, Field]
    decode: Program
    root: Program | None
    encode: Program | None
    nearest: Program


def _buffer(suffix: str, field: Field) -> Buffer:
    return buffer_of(suffix or CODE, field, "state", suffix or CODE)


def _parts(fields: Mapping[str, Field], record: Recorder | None) -> dict[str, Num]:
    """Return what the fields hold: suffix -> value."""
    return {k: read(_buffer(k, f), record) for k, f in fields.items()}


def _value(name: str) -> Buffer:
    return Buffer(name, dtypes.f32, spaces.elem, "value", name)


def _program(name: str, fields: Mapping[str, Field], lets: list[Let], stores: Mapping[str, Num]) -> Program:
    known = [*map(_value, (X, ROOT, UNROUNDED)), *(_buffer(k, f) for k, f in fields.items())]
    nodes = {key: value.node for key, value in stores.items()}
    read = set(ir.loads(nodes.values()))
    buffers = tuple(b for b in known if b.name in read or b.name in nodes)
    body = tuple(let for let in lets if let.node.op != "load")
    return Program(name, buffers, (), body, tuple(Store(k, n) for k, n in nodes.items()), "strict", block_of(buffers))


Reads = Callable[[dict[str, Num]], Num]


def _codec(fields: Mapping[str, Field], bits: int, decode: Reads, root: Reads | None, encode: Any) -> CodecPrograms:
    """Return the programs of functions of what fields hold, and of `encode(x, noise)`, which makes that of a value."""

    def reading(name: str, key: str, read: Reads) -> Program:
        record = Recorder("", "decode")
        value = read(_parts(fields, record))
        return _program(name, fields, record.lets(), {key: value})

    def writing(noise: Noise | None) -> Program:
        record = Recorder("", "encode")
        made = encode(Value(ir.load(X, dtypes.f32, spaces.elem), record), noise=noise)
        return _program("encode", fields, record.lets(), {k or CODE: v for k, v in made.items()})

    rooted = None if root is None else reading("root", ROOT, root)
    drawn = writing(Drawn(bits=bits)) if bits else None
    return CodecPrograms(fields, reading("decode", X, decode), rooted, drawn, writing(None))


def lower_codec(fmt: Format) -> CodecPrograms:
    """Lower a format of states, absolute: values are divided and multiplied by the root outside, and made +0 there."""
    fmt = fmt.absolute() if fmt.relative else fmt
    rooted = fmt.positive or not fmt.signed

    def encode(x: Value, noise: Noise | None) -> Mapping[str, Num]:
        if not rooted:
            return fmt.encode(x, noise=noise)
        made, *roots = fmt.encode_root(x, noise)
        return made | dict(zip((ROOT, UNROUNDED), roots, strict=False))

    return _codec(fmt.fields(), fmt.noise_bits, fmt.decode, fmt.decode_root if rooted else None, encode)


def lower_weight(master: Master, param: DType) -> CodecPrograms:
    """Lower how a weight is kept for one dtype of parameters."""
    decode, encode = partial(master.decode, param=param), partial(master.encode, param=param)
    return _codec(master.fields(param), master.noise_bits(param), decode, None, encode)


__all__ = ["CODE", "ROOT", "UNROUNDED", "CodecPrograms", "X", "lower_codec", "lower_weight"]
