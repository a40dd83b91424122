"""A step in eager torch: the tiles of a rule and the codecs of a plan, run over one parameter at a time.

What a kernel walks tile by tile is here one tile, the whole parameter in its storage blocks.  The stages, the order of
sums and the random bits are those of strict kernels, and so is every bit of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from optgen.runtime.records import COPY, EIGHT, Field, Rule, Stage, Temp, Variant, dtype_of, keys
from optgen.runtime.records.whole_states import divided
from optgen.runtime.reference import eager, tile
from optgen.runtime.reference.eager import Blocks

ONE = ("tensor", "model")
"""Spaces of one value of a parameter."""


@dataclass
class Tensors:
    """The tensors that the step of one parameter reads and writes, in the shape of its matrices.

    fields  what is stored beside the weight, by name
    temps   what the stages leave for one another, by name: (..., rows, 1) of rows and so on
    place   where the parameter lies in the logical tensor that it is a part of; None: it is all of it
    stream  the key of its random bits
    """

    p: Tensor
    g: Tensor | None
    fields: Mapping[str, Tensor]
    temps: dict[str, Tensor] = field(default_factory=dict)
    place: tuple[int, int, int] | None = None
    stream: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.p if name == "p" else self.temps[name] if name in self.temps else self.fields[name]


class EagerStep:
    """The stages of a variant in strict maths, with the functions of its rule and of its plan's codecs."""

    def __init__(self, variant: Variant, tiles: ModuleType, codecs: ModuleType) -> None:
        assert variant.rule is not None
        self.variant, self.tiles, self.record = variant, tiles, variant.eager
        self.device: Any = tile.load(tile.CODECS)
        named = {owner: name for owner, name in variant.eager.codecs.items() if name}
        self.codecs = {owner: getattr(codecs, name) for owner, name in named.items()}
        self.views = {view.name: getattr(codecs, view.name) for view in variant.views}
        self.fields: Mapping[str, Field] = variant.stored
        self.temps: dict[str, Temp] = {t.name: t for t in variant.temps}
        self.stages = [(s, self._tile(s)) for s in variant.rule.stages if not s.on_host]
        words = tuple((at, narrow, anew) for at, narrow, anew in variant.eager.words)
        self.words = SimpleNamespace(recipes=keys.recipes(words), words=words)

    def run(self, begin: int, end: int, x: Tensors, scalars: Sequence[Tensor], step_key: int) -> None:
        """Run the stages from `begin` to `end`, functions of whole matrices not counted, over one parameter."""
        for stage, function in self.stages[begin:end]:
            given = [scalars[k] for k in stage.scalars]
            if stage.space == "elem":
                TileSweep(self, stage, x).run(function, given, step_key)
            else:
                self._small(stage, function, x, given)

    def _tile(self, stage: Stage) -> Any:
        """Return the function of a stage."""
        if stage.kernel == COPY:
            return lambda x, *_: (x, x)
        if stage.state:
            return self.codecs[stage.state].small[int(stage.kernel.removeprefix("small_")) - 1]
        return getattr(self.tiles, f"{stage.kernel}_{'tile' if stage.space == 'elem' else 'values'}")

    def codec(self, owner: str) -> Any:
        """Return the codec of the weight ("p") or of a state."""
        return self.codecs.get(owner, self.device.FULL)

    def tables(self, owner: str, device: torch.device) -> list[tile.Pointer]:
        """Return the tables of numbers that a codec looks things up in."""
        return [tile.Pointer(eager.entries(t, device)) for t in self.codec(owner).tables]

    def wide(self, owner: str) -> bool:
        """Return True for the weight and for states with a value for each element."""
        return owner == "p" or any(f.owner == owner and f.wide for f in self.variant.fields)

    def value(self, owner: str) -> SimpleNamespace:
        """Return what `optgen.runtime.gpu.codecs.Kept` says of a value."""
        codec, (word, shift) = self.codec(owner), self.record.noise.get(owner, (-1, 0))
        base = 0 if owner in self.record.relative else -1
        return SimpleNamespace(
            name=owner, codec=codec, base=base, root=base, word=word, shift=shift, plus=codec.plus, guarded=False
        )

    def _small(self, stage: Stage, function: Any, x: Tensors, scalars: Sequence[Tensor]) -> None:
        """Run small work: a function of values of rows, columns, matrices or the parameter."""
        b, given = Blocks(x.p, 1, x.place), [x[name] for name in stage.reads]
        if stage.kernel == COPY:
            made = given * (len(stage.stores) + len(stage.sums))
        else:
            made = function(*given, *(b.extent(name) for name in stage.extents), *scalars)
        shape = few_shape(stage.space, x.p.shape)
        made = [y.expand(shape) for y in made]
        pairs = [(x[name], y) for name, y in zip(stage.stores, made, strict=False)]
        for (kind, names), y in zip(stage.sums, made[len(stage.stores) :], strict=True):
            few = eager.few_max if kind == "max" else eager.few_sum
            pairs += [(x[name], few(y, "tensor" if self.temps[name].space in ONE else "mat")) for name in names]
        write(pairs)


def few_shape(space: str, shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the values of a small space of a tensor."""
    *batch, rows, columns = (1, 1, *shape)[-max(len(shape), 2) :]
    of = {"row": (*batch, rows, 1), "col": (*batch, 1, columns), "mat": (*batch, 1, 1)}
    return of.get(space, ())


def write(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy new values to where they are kept: a value that is a view of what is overwritten is copied out first."""
    kept = {to.untyped_storage().data_ptr() for to, _ in pairs}
    held = [(to, y.clone() if len(pairs) > 1 and y.untyped_storage().data_ptr() in kept else y) for to, y in pairs]
    for to, y in held:
        to.copy_(y)


class TileSweep:
    """A sweep over the elements of one parameter, in the storage blocks of what it touches."""

    def __init__(self, e: EagerStep, stage: Stage, x: Tensors) -> None:
        self.e, self.stage, self.x = e, stage, x
        self.live = e.variant.stored_by(stage)
        self.b = Blocks(x.p, e.variant.block_in(stage), x.place)
        self.mask = ALL if self.b.live is None else self.b.live
        self.words: dict[int, Tensor] = {}

    def run(self, function: Any, scalars: Sequence[Tensor], step_key: int) -> None:
        """Compute the new values, reduce what is summed, and store the rest."""
        e, stage, b = self.e, self.stage, self.b
        if not self.x.p.numel():  # of a tensor that lies over several ranks
            for name in stage.temps:
                self.x[name].fill_(-math.inf if e.temps[name].reduction.endswith("max") else 0)
            return
        values = {o: e.value(o) for o in (*stage.reads, *self.live) if o not in e.temps}
        absent = {o: SimpleNamespace(codec=e.device.FULL, base=-1) for o in stage.absent}
        given = [self._given(o, values, step_key) for o in stage.reads]
        extents = [b.extent(name) for name in stage.extents]
        made = function(SimpleNamespace(**(values | absent)), *given, *extents, *scalars, self.mask, b.live is not None)
        new = dict(zip(stage.stores, made, strict=False))
        terms = [new[name] for name in stage.reduces] if stage.reduces else made[len(stage.stores) :]
        pairs = [
            (self.x[name], getattr(b, e.temps[name].reduction)(term))
            for (_, names), term in zip(stage.sums, terms, strict=True)
            for name in names
        ]
        write(pairs + self._stored(new, values, step_key))

    def _given(self, name: str, values: Mapping[str, Any], step_key: int) -> Any:
        """Return a value as the tile function gets it."""
        e, x, b = self.e, self.x, self.b
        if name in self.stage.absent:
            zero = torch.zeros((), device=x.p.device)
            return (0, (zero,)) if name in e.variant.states and e.wide(name) else zero
        if name == "g":
            assert x.g is not None
            return b.elements(x.g).to(torch.float32)
        if name in e.temps and e.temps[name].space == "elem":
            return b.elements(x[name]).to(torch.float32)
        if not e.wide(name):
            return b.spread(x[name])
        base = e.record.relative.get(name)
        root = 0 if base is None else e.codec(base).root(*self._fields(base))
        value = root, self._fields(name)
        return e.device.read(value, values[name]) if name == "p" else value

    def _fields(self, owner: str) -> tuple[Any, ...]:
        """Return what a value is read from, and the tables of its codec."""
        return (*map(self._one, self.e.variant.read_from(owner)), *self._tables(owner))

    def _tables(self, owner: str) -> Sequence[tile.Pointer]:
        return self.e.tables(owner, self.x.p.device)

    def _one(self, name: str) -> Tensor:
        """Return a field or a temp beside the elements; the entries of blocks have one dimension less."""
        f, x, b = self.e.fields.get(name), self.x[name], self.b
        if f is None and name != "p":
            return b.spread(x)
        if f is None or (f.space == "elem" and f.per == 1):
            return b.elements(x)
        if f.space != "elem":
            return b.spread(x)
        return b.codes(x, f.width) if f.per == EIGHT else x.view(b.rows, b.blocks)

    def _stored(
        self, new: Mapping[str, Tensor], values: Mapping[str, Any], step_key: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return where new values are kept, and what is written there."""
        e, x, b = self.e, self.x, self.b
        bases = set(e.record.relative.values())
        order = sorted(self.live, key=lambda o: (o != "p", o not in bases))
        rooted = [o for o in order if e.codec(o).root is not None]
        roots: dict[str, Tensor] = {}
        out = []
        for o in order:
            if o in e.temps or not e.wide(o):
                out.append((x[o], b.flat(new[o]) if e.variant.spaces[o] == "elem" else new[o]))
                continue
            value = values[o]
            if value.root >= 0:
                value.root = rooted.index(e.record.relative[o])
            own = [*map(self._one, self._kept_with(o)), *self._tables(o)]
            words = self._words(value, step_key)
            made = e.device.encoded(new[o], (*roots.values(),), words, (self.mask,), own, value, b.live is not None)
            names = [
                n
                for n in e.variant.read_from(o)
                if o not in e.record.whole or (n in e.fields and e.variant.spaces[n] == "elem")
            ]
            out += [(x[name], self._flat(name, y)) for name, y in zip(names, made, strict=False)]
            out += self._shown(o, made[0])
            roots |= {o: made[len(names) + (o in e.record.unrounded)]} if o in rooted else {}
        return out

    def _shown(self, owner: str, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return where the views of a new weight are kept, and what is written there."""
        e = self.e
        return [(self.x[k], y) for k, y in views_of(e.variant, e.views, weight, self.x, self.b)] if owner == "p" else []

    def _words(self, value: Any, step_key: int) -> dict[int, Tensor]:
        """Return the word of random bits that a value is rounded with, if it is, by its number."""
        if value.word < 0:
            return {}
        if value.word not in self.words:
            key = torch.tensor(step_key, dtype=torch.int32, device=self.x.p.device)
            drawn = self.e.device.word(self.b.index(), key, self.x.stream, self.e.words, value.word)
            self.words[value.word] = drawn
        return self.words

    def _kept_with(self, owner: str) -> list[str]:
        """Return what else a value is encoded with."""
        whole = self.e.record.whole.get(owner)
        return [f"{owner}_{x}" for x in whole.encode] if whole else []

    def _flat(self, name: str, y: Tensor) -> Tensor:
        """Return the contents of a field in the shape in which they are kept."""
        f = self.e.fields.get(name)
        if f is not None and f.per == EIGHT:
            return self.b.flat_codes(y & (1 << f.width) - 1, f.width)
        return self.b.flat(y) if f is None or f.per == 1 else y.expand(self.b.rows, self.b.blocks)


def views_of(
    variant: Variant, codecs: Mapping[str, Any], weight: Tensor, kept: Any, b: Blocks
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield the name and the contents of each tensor of the views of a weight (rows, blocks, size).

    kept  name -> tensor, of the scales of tensors
    """
    for view in variant.views:
        if view.transposed:
            if kept[view.fields[0].name].numel():
                turned = b.flat(weight).to(torch.float32).t()
                made = codecs[view.name].nearest(turned.reshape(len(turned), -1, view.size), None, False)
                yield from ((f.name, x.reshape(len(turned), -1)) for f, x in zip(view.fields, made, strict=True))
            continue
        live = None if b.live is None else b.live.expand(weight.shape).reshape(b.rows, -1, view.size)
        blocks = weight.to(torch.float32).reshape(b.rows, -1, view.size)
        blocks = blocks / kept[view.fields[-1].name] if view.scaled else blocks
        code, *bytes_ = codecs[view.name].nearest(blocks, live, live is not None)
        (codes, *words), code = view.fields, code.reshape(weight.shape)
        yield codes.name, b.flat(code) if codes.per == 1 else b.flat_codes(code, codes.width)
        yield from ((f.name, y.view(f.torch_dtype)) for f, y in zip(words, bytes_, strict=False))


ALL = torch.ones((), dtype=torch.bool)
"""The mask of blocks that are all full."""


def room(temps: Iterable[Temp], x: Tensors) -> dict[str, Tensor]:
    """Return memory for values that stages leave for one another."""
    shapes = {t.name: x.p.shape if t.space == "elem" else few_shape(t.space, x.p.shape) for t in temps}
    return {name: torch.empty(shape, dtype=torch.float32, device=x.p.device) for name, shape in shapes.items()}


class ValueConversion(EagerStep):
    """The conversion of a variant's element-wise values to fp32 and back, to nearest: two rules that compute nothing.

    `decode` reads each value to a temp, `encode` stores what temps hold.
    """

    def __init__(self, variant: Variant, codecs: ModuleType) -> None:
        plain = replace(variant.eager, noise={}, words=(), still=(), early=())
        self.bare = replace(variant, temps=(), stages=(), rule=None, eager=plain)
        self.module = codecs
        self.owners = ["p", *dict.fromkeys(f.owner for f in variant.fields if f.wide and f.owner != "p")]
        super().__init__(self._of("decode", self.owners, [f"{o}_value" for o in self.owners]), _TILES, codecs)
        self.views = {view.name: getattr(codecs, view.name) for view in variant.views}

    def _of(self, kernel: str, reads: Sequence[str], stores: Sequence[str]) -> Variant:
        """Return the variant with a rule of one sweep, and what its states need that are kept as a whole."""
        temps = tuple(Temp(f"{o}_value", "elem", wide=True) for o in self.owners)
        stage = Stage(kernel, "elem", reads=tuple(reads), stores=tuple(stores), needs=tuple(reads))
        rule = Rule(({},), 0, lambda *_: (), stages=(stage,))
        return divided(replace(self.bare, temps=temps, rule=rule, views=()))

    def decode(self, p: Tensor, *fields: Tensor) -> dict[str, Tensor]:
        """Return the weight "p" and the states: fp32, of p's shape.  fields: those of element-wise states, in order."""
        names = [f.name for f in self.variant.fields if f.wide]
        x = Tensors(p, None, dict(zip(names, fields, strict=True)))
        x.temps = room(self.temps.values(), x)
        self.run(0, len(self.stages), x, (), 0)
        return {o: x.temps[f"{o}_value"] for o in self.owners}

    def encode(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields of fp32 values of one shape, "p" among them."""
        owners = [o for o in self.owners if o in values]
        e = EagerStep(self._of("encode", [f"{o}_value" for o in owners], owners), _TILES, self.module)
        p = torch.empty_like(values["p"], dtype=dtype_of(self.variant.param))
        x = Tensors(p, None, {})
        x.fields = {f.name: _field(f, x) for f in self.variant.fields if f.owner in owners}
        x.temps = room(e.temps.values(), x)
        x.temps |= {f"{o}_value": values[o] for o in owners}
        e.run(0, len(e.stages), x, (), 0)
        return {"p": p, **x.fields}

    def nearest(self, owner: str, x: Tensor) -> Sequence[Tensor]:
        """Return the fields of a value in full blocks (rows, blocks, size)."""
        made: Sequence[Tensor] = self.codec(owner).nearest(x, ALL, False, *self.tables(owner, x.device))
        return made

    def shown(self, p: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the views of a weight, by name, under the scales of tensors that are `kept`."""
        b = Blocks(p, self.bare.block_of((), True))
        return dict(views_of(self.bare, self.views, b.elements(p), kept, b))

    def weight(self, parts: Sequence[Tensor]) -> Tensor:
        """Return fp32 weights, from what is stored of each."""
        found: Tensor = self.device.read((0, tuple(parts)), self.value("p"))
        return found


def _field(f: Field, x: Tensors) -> Tensor:
    """Return memory for a field."""
    rows, columns = eager.rows_and_columns(x.p.shape)
    shape: Sequence[int] = x.p.shape if f.space == "elem" else few_shape(f.space, x.p.shape)
    if f.per > 1:
        shape = (rows, -(-columns // f.per) * f.width)
    return torch.empty(shape, dtype=f.torch_dtype, device=x.p.device)


def _decode_tile(PLAN: Any, p: Tensor, *states: Any) -> list[Tensor]:
    read, (names) = tile.load(tile.CODECS).read, [n for n in vars(PLAN) if n != "p"]
    return [p, *(read(x, getattr(PLAN, n)) for n, x in zip(names, states[:-2], strict=True))]


_TILES: Any = SimpleNamespace(decode_tile=_decode_tile, encode_tile=lambda PLAN, *given: given[:-2])
"""The tiles of rules that compute nothing."""
