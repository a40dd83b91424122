"""A parameter as an eager rule function sees it: values that the codecs of a plan load and store.

A rule's eager text is free of any plan: `stored.over(...)` begins a sweep, `b.load(name)` decodes a value and
`b.store(name, x)` encodes one.  Which codec keeps which value, and which random bits it rounds with, stands in the
variant's `Eager` record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.records import PACK, Eager, Variant, keys
from optgen.runtime.reference import matrices
from optgen.runtime.reference.eager import Blocks, few_sum, rotl, scalars
from optgen.runtime.reference.matrix_codecs import CODECS

M1, M2, M3 = (keys.signed(m) for m in (keys.M1, keys.M2, keys.M3))


@dataclass(frozen=True)
class Codec:
    """The functions that store and read one value, from a plan's codec module.

    decode   (b, fields...) -> fp32 value
    nearest  (b, x) -> the fields as they are stored, then the root that is read back, where there is `root`
    encode   (b, x, noise) -> the same, rounded stochastically; None: the codec rounds to nearest
    root     (b, fields...) -> square root of the value
    block    elements that share a field; 1 where none do
    packed   True if codes share bytes
    whole    True if the fields hold statistics of the whole tensor
    """

    decode: Callable[..., Tensor]
    nearest: Callable[..., tuple[Tensor, ...]]
    encode: Callable[..., tuple[Tensor, ...]] | None = None
    root: Callable[..., Tensor] | None = None
    block: int = 1
    packed: bool = False
    whole: bool = False


FULL = Codec(lambda b, x: b.elements(x), lambda b, x: (b.flat(x),))
"""fp32 as it is."""


class Noise:
    """The random bits of one value: some of the bits of a word, from `shift` on."""

    def __init__(self, word: Tensor, shift: int) -> None:
        self.word, self.shift = word, shift

    def integer(self, bits: int) -> Tensor:
        """int32, uniform on 0 .. 2^bits - 1."""
        return self.word if bits == 32 else self.word >> self.shift & (1 << bits) - 1

    def fraction(self, bits: int, width: int) -> Tensor:
        """int32, uniform on 0 .. 2^width - 1: the own bits on top, below them the next of the word, or half a cell."""
        if self.shift + bits == 32:
            return Noise(self.word, 32 - width).integer(width)
        if width == bits:
            return self.integer(bits)
        return self.integer(bits) << width - bits | 1 << width - bits - 1

    def middle(self, bits: int, width: int) -> Tensor:
        """int32, the midpoints of 2^bits cells of 0 .. 2^width."""
        below = width - bits
        if self.shift + bits == 32 and below == 1:
            return Noise(self.word, self.shift - 1).integer(width) | 1
        return self.integer(bits) << below | 1 << below - 1


def word(b: Blocks, k: int, recipe: keys.Word, step: int, stream: int) -> Tensor:
    """The k-th 32-bit word of every element, int32: hash(element, stream, window of steps), spread over the window."""
    at, narrow, anew = recipe
    index = b.index()
    window, place = step & -keys.WINDOW, step & keys.WINDOW - 1
    x = index >> 3 & 0x1FFFFFFF ^ stream ^ window
    if anew:
        x = x ^ keys.signed(place * M2)
    x = (x ^ keys.signed(keys.salt(k)) if k else x) * M1
    x = (x ^ x >> 16 & 0xFFFF) * M2
    x = x ^ x >> 15 & 0x1FFFF
    moved = x if anew else x ^ keys.signed(place * at)
    for shift, bits in narrow:
        highest, up = step & (keys.WINDOW - 1 & -(1 << keys.PLACE - bits)), shift + bits - keys.PLACE
        moved = moved ^ keys.signed(highest << up if up >= 0 else highest >> -up)
    y = (x ^ x >> 16 & 0xFFFF) * M3
    y = (y ^ y >> 15 & 0x1FFFF) * M1
    y = y ^ y >> 16 & 0xFFFF
    lane = index & 7
    return moved ^ rotl(y, (lane * (lane + 1) >> 1) + 1)


class Stored:
    """One parameter in one step: its gradient, what is stored of it, and the codecs that read and write it."""

    def __init__(
        self,
        variant: Variant,
        codecs: ModuleType,
        p: Tensor,
        g: Tensor | None,
        fields: Mapping[str, Tensor],
        random_keys: tuple[int, int] = (0, 0),
        place: tuple[int, int, int] | None = None,
        dims: Sequence[int] | None = None,
    ) -> None:
        self.record: Eager = variant.eager
        self.variant, self.codecs, self.p, self.g, self.fields = variant, codecs, p, g, fields
        self.step_key, self.stream_key = random_keys
        self.place, self.dims = place, dims
        self.bases = frozenset(self.record.relative.values())
        self.made: dict[str, Tensor] = {}  # new values in the parameter's shape, as they were computed
        self.roots: dict[str, Tensor] = {}  # roots of new values as they will be read back, in the sweep's blocks

    def __getitem__(self, name: str) -> Tensor:
        """A state of few values, or of whole matrices."""
        trait = self.record.matrices.get(name)
        if trait is None:
            return self.fields[name]
        return CODECS[trait].decode(*(self.fields[x] for x in self.variant.coded(name)))

    def put(self, name: str, x: Tensor) -> None:
        """Write a state of whole matrices; one that is relative to another together with that."""
        trait, over = self.record.matrices.get(name), self.record.over.get(name)
        self.made[name] = x
        if over is not None and over not in self.made:
            return
        noise = matrices.rounding(name, self.step_key, self.streams()) if name in self.record.random else None
        base = self.parts(over) if over else []
        new = (x,) if trait is None else CODECS[trait].encode(x, *base, noise=noise)
        for to, part in zip(self.parts(name), new, strict=True):
            to.copy_(part)
        for other in [x for x, base in self.record.over.items() if base == name and x in self.made]:
            self.put(other, self.made[other])

    def streams(self) -> Tensor:
        """The stream keys of the parameter's matrices."""
        return matrices.streams(self.stream_key, self.p.shape[:-2], self.p.device)

    def codec(self, owner: str) -> Codec:
        """The codec of the weight ("p") or a state."""
        name = self.record.codecs.get(owner, "")
        found: Codec = getattr(self.codecs, name) if name else FULL
        return found

    def parts(self, owner: str) -> list[Tensor]:
        """The tensors that keep a value."""
        names = self.variant.owned(owner)
        return [*([self.p] if owner == "p" else []), *(self.fields[name] for name in names)]

    def over(self, *names: str) -> Sweep:
        """Begin a sweep that touches these values; its blocks are theirs."""
        used = [self.codec(name) for name in names if name != "g"]
        size = max((c.block for c in used), default=1)
        if size == 1 and any(c.packed for c in used):
            size = PACK
        return Sweep(self, size)


class Sweep(Blocks):
    """The blocks of a parameter, and the values that a rule loads and stores in them."""

    def __init__(self, stored: Stored, size: int) -> None:
        super().__init__(stored.p, size, stored.place, stored.dims)
        self.stored = stored
        self.words: dict[int, Tensor] = {}

    def _own(self, codec: Codec, walked: int = 1) -> Blocks:
        """The blocks in which a codec of whole tensors works: those of its codes, else `walked`."""
        if not codec.whole:
            return self
        return self.by(codec.block if codec.block > 1 else PACK if codec.packed else walked)

    def _read(self, function: Callable[..., Tensor], owner: str) -> Tensor:
        codec = self.stored.codec(owner)
        own = self._own(codec)
        found = function(own, *self.stored.parts(owner))
        return found if own is self else self.elements(own.flat(found))

    def load(self, name: str) -> Tensor:
        """fp32 values in blocks: as they are stored, or as this step computed them where the plan stores them last."""
        s = self.stored
        if name == "g":
            assert s.g is not None
            return self.elements(s.g).to(torch.float32)
        if name in s.record.draws:
            return matrices.drawn(self.index(padded=False), name, s.step_key, s.stream_key)
        if name in s.made and name not in s.record.early:
            return self.elements(s.made[name])
        value = self._read(s.codec(name).decode, name)
        base = s.record.relative.get(name)
        return value if base is None else value * self._root(base)

    def _root(self, base: str) -> Tensor:
        function = self.stored.codec(base).root
        assert function is not None
        return self._read(function, base)

    def store(self, name: str, x: Tensor) -> None:
        """Encode new values (fp32, in blocks) and write them to the tensors that keep them."""
        s = self.stored
        if name in s.record.still:
            return
        s.made[name] = self.flat(x)
        base = s.record.relative.get(name)
        if base is not None:
            if base not in s.roots:
                self.store(base, self.load(base))
            x = x / s.roots[base]
        made = self.encode(name, x)
        for to, new in zip(s.parts(name), made, strict=False):
            to.copy_(new)
        if name in s.bases:
            s.roots[name] = made[-1] if not s.codec(name).whole else self._read(_root_of(s.codec(name)), name)

    def encode(self, name: str, x: Tensor, stochastic: bool = True) -> tuple[Tensor, ...]:
        """The fields of x, and the root that will be read back of it where the codec has one."""
        s, codec = self.stored, self.stored.codec(name)
        own = self._own(codec, s.record.walks.get(name, 1))
        x = x if own is self else own.elements(self.flat(x))
        if codec.encode is None or not stochastic or name not in s.record.noise:
            return codec.nearest(own, x)
        k, shift = s.record.noise[name]
        if k not in self.words:
            self.words[k] = word(self, k, s.record.words[k], s.step_key, s.stream_key)
        bits = self.words[k]
        return codec.encode(own, x, Noise(bits if own is self else own.elements(self.flat(bits)), shift))


def _root_of(codec: Codec) -> Callable[..., Tensor]:
    assert codec.root is not None
    return codec.root


class _RowsFirst(Sweep):
    """A sweep of a step that the plan divides: its kernels sum over the tensor by rows, for they sum rows anyway."""

    def tensor_sum(self, x: Tensor) -> Tensor:
        return few_sum(self.row_sum(x), "tensor")


class _Divided(Stored):
    """A parameter whose sweeps are of that kind."""

    def over(self, *names: str) -> Sweep:
        return _RowsFirst(self, super().over(*names).size)


def step(variant: Variant, rule: ModuleType, codecs: ModuleType) -> Callable[..., Any]:
    """Return `step(p, g, fields..., scalars..., step_key, stream_key, place, dims)`: a step of a rule under a plan."""
    function = getattr(rule, variant.step)
    count = len(variant.fields)
    kind = _Divided if variant.eager.whole else Stored

    def run(
        p: Tensor, g: Tensor, *rest: Any, place: tuple[int, int, int] | None = None, dims: Sequence[int] | None = None
    ) -> Any:
        fields = dict(zip(variant.names, rest[:count], strict=True))
        stored = kind(variant, codecs, p, g, fields, rest[-2:], place, dims)
        return function(stored, *(scalars(p, *rest[count:-2]) if len(rest) > count + 2 else ()))

    return run


def decode(variant: Variant, codecs: ModuleType) -> Callable[..., dict[str, Tensor]]:
    """`decode(p, fields..., dims) -> {"p": weight, state: values}`: fp32, of p's shape; element-wise states only."""
    wide = [f.name for f in variant.fields if f.wide]

    def run(p: Tensor, *rest: Tensor, dims: Sequence[int] | None = None) -> dict[str, Tensor]:
        stored = Stored(variant, codecs, p, None, dict(zip(wide, rest, strict=True)), dims=dims)
        owners = list(_owners(variant))
        b = stored.over(*owners)
        return {owner: b.flat(b.load(owner)) for owner in owners}

    return run


def encode(variant: Variant, codecs: ModuleType) -> Callable[..., dict[str, Tensor]]:
    """`encode({"p": weight, state: values}, dims) -> fields`: rounded to nearest; element-wise states only."""

    def run(values: Mapping[str, Tensor], dims: Sequence[int] | None = None) -> dict[str, Tensor]:
        stored = Stored(variant, codecs, values["p"], None, {}, dims=dims)
        owners = [owner for owner in _owners(variant) if owner in values]
        b = stored.over(*owners)
        roots: dict[str, Tensor] = {}
        out: dict[str, Tensor] = {}
        for owner in sorted(owners, key=lambda x: x not in stored.bases):
            x, base = b.elements(values[owner]), stored.record.relative.get(owner)
            made = b.encode(owner, x if base is None else x / roots[base], stochastic=False)
            names = [*(["p"] if owner == "p" else []), *variant.owned(owner)]
            out |= dict(zip(names, made, strict=False))
            if owner in stored.bases:
                codec = stored.codec(owner)
                own = b._own(codec)
                roots[owner] = made[-1] if own is b else b.elements(own.flat(_root_of(codec)(own, *made[: len(names)])))
        return out

    return run


def _owners(variant: Variant) -> Iterator[str]:
    """The weight and the states with a value for each element."""
    yield "p"
    yield from dict.fromkeys(f.owner for f in variant.fields if f.wide and f.owner != "p")


__all__ = ["FULL", "Codec", "Noise", "Stored", "Sweep", "decode", "encode", "step"]
