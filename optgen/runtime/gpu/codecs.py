"""Device functions of generated tiles and codecs: values as a plan keeps them, and the random bits of their rounding.

A tile function of a rule gets a state as the pair (root, fields): the root of the second moment that the state is
relative to (0 where it is not), and what is stored, with the addresses of tables of numbers behind.  It reads states
by `times`, `plus` and `read` only, which take the state's record in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from optgen.runtime.gpu.prelude import INTERPRETED, get, packed, pointer, put, reciprocal, rotl, unpacked, widened
from optgen.runtime.records import keys

M1, M2, M3 = (tl.constexpr(keys.signed(m)) for m in (keys.M1, keys.M2, keys.M3))
WINDOW = tl.constexpr(keys.WINDOW)
ROWS, ACROSS = tl.constexpr(32), tl.constexpr(64)  # of a tile of `encode_columns`


@dataclass(frozen=True, eq=False)
class Codec:
    """The device functions that store and read one value, from a plan's module.

    decode    (c, fields..., tables...) -> two factors of c * x: c meets what there are few of
    nearest   (x, live, MASKED, tables...) -> the fields, then the root that is read back, where there is `root`, and
              that before it is rounded
    encode    (x, live, MASKED, draws, SHIFT, tables...) -> the same, rounded stochastically; None: to nearest only
    root      (fields..., tables...) -> the square root of the value
    strict    strict maths
    guards    `encode` wants a NaN that arithmetic has made
    looks_up  it searches or selects among many numbers
    lines     it takes the numbers of a table for points of a few lines
    plus      a zero must be +0
    tables    the numbers that it reads from memory
    small     functions of the small work for a state that is kept as a whole (optgen.runtime.records.Whole)
    """

    decode: Any
    nearest: Any
    encode: Any = None
    root: Any = None
    strict: bool = False
    guards: bool = False
    looks_up: bool = False
    lines: bool = False
    plus: bool = False
    tables: tuple[tuple[float, ...], ...] = ()
    small: tuple[Any, ...] = ()

    @property
    def cache_key(self) -> str:
        """The text of the functions: of a record without it Triton would name a compiled kernel by their names."""
        functions = (self.decode, self.nearest, self.encode, self.root, *self.small)
        return " ".join(getattr(f, "cache_key", "") for f in functions) + repr(self)


@dataclass(frozen=True, eq=False)
class StoredValue:
    """A value of a rule, as a plan keeps it.

    fields    the positions of the buffers that it is read from among those of the sweep
    stores    the positions of those that it is stored in
    given     the positions of what else it is encoded with
    tables    the positions of its codec's tables
    base      the position of the value that it is relative to; -1: none
    root      the position of that one's new root among the roots of the sweep
    unrounded  what others are divided by is its root before it is rounded
    word, shift  its random bits; word -1: it is rounded to nearest
    plus      a zero must be made +0 before it is stored
    guarded   a NaN must be made one of arithmetic before it is stored
    direct    the tile function takes it as it lies in memory
    absent    nothing depends on it: it is not read
    """

    name: str
    codec: Codec
    fields: tuple[int, ...]
    stores: tuple[int, ...]
    given: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()
    base: int = -1
    root: int = -1
    unrounded: bool = False
    word: int = -1
    shift: int = 0
    plus: bool = False
    guarded: bool = False
    direct: bool = False
    absent: bool = False

    @property
    def cache_key(self) -> str:
        """The record's part of the name under which Triton keeps a compiled kernel."""
        return repr(self) + self.codec.cache_key


@dataclass(frozen=True, eq=False)
class StoredView:
    """A view of the weight.

    size    elements of its own block
    stores  the positions of the buffers that it is stored in: codes, then words of bytes of blocks
    scale   the position of the tensor's scale, a power of two; -1: it has none
    """

    codec: Codec
    size: int
    stores: tuple[int, ...]
    scale: int

    @property
    def cache_key(self) -> str:
        """The record's part of the name under which Triton keeps a compiled kernel."""
        return repr(self) + self.codec.cache_key


class ValuesByName:
    """The values of a rule by their names, as attributes.

    Triton 3.6 makes no constants of the attributes of a constant; its interpreter knows none.
    """

    def __init__(self, values: tuple[StoredValue, ...]) -> None:
        self.__dict__.update({x.name: x if INTERPRETED.value else tl.constexpr(x) for x in values})

    def __repr__(self) -> str:
        # By it Triton tells the functions of a kernel apart, and shares equal ones.
        return f"Plan({', '.join(vars(self))})"


@triton.jit
def plain_decode(c, x):
    """c and x, a float."""
    return c, widened(x)


@triton.jit
def plain_nearest(x, live, MASKED: tl.constexpr):
    """x, float32."""
    return (x,)


FULL = Codec(plain_decode, plain_nearest)
"""fp32 as it is; gradients of any dtype."""


# -- what codecs call


@triton.jit
def beside(x):
    """A value of each block, to be broadcast along its elements."""
    return tl.expand_dims(x, len(x.shape))


# -- what tile functions call


@triton.jit
def factors(c, x, VALUE: tl.constexpr):
    """Two factors of c * x."""
    fields = x[1]
    a, b = VALUE.codec.decode(c, *fields)
    if VALUE.base >= 0:
        b = b * x[0]
    return a, b


@triton.jit
def times(c, x, VALUE: tl.constexpr):
    """c * x."""
    a, b = factors(c, x, VALUE)
    return a * b


@triton.jit
def plus(c, x, y, VALUE: tl.constexpr):
    """c * x + y, rounded once where c * x is one product of an element."""
    a, b = factors(c, x, VALUE)
    return tl.fma(a, b, y)


@triton.jit
def read(x, VALUE: tl.constexpr):
    """x, float32."""
    return times(tl.full([], 1.0, tl.float32), x, VALUE)


# -- what the walker calls


@triton.jit
def loaded(buffer, where, live, SWEEP: tl.constexpr, I: tl.constexpr, MASKED: tl.constexpr):
    """The entries of a buffer for a tile; those of blocks have one dimension less than those of elements."""
    if SWEEP.kind(I) == "eight":
        out = unpacked(get(buffer, where[2], live[2], MASKED), SWEEP.bits(I))
    elif SWEEP.kind(I) == "one":
        out = tl.load(buffer)
    else:
        out = get(buffer, where[SWEEP.slot(I)], live[SWEEP.slot(I)], MASKED)
    return out


@triton.jit
def stored(buffer, x, where, live, SWEEP: tl.constexpr, I: tl.constexpr, MASKED: tl.constexpr):
    """Write the entries of a buffer for a tile."""
    if SWEEP.kind(I) == "block":
        put(buffer, where[1], x, live[1], MASKED)
    elif SWEEP.kind(I) == "eight":
        put(buffer, where[2], packed(x, live[0], MASKED, SWEEP.bits(I)), live[2], MASKED)
    else:
        put(buffer, where[0], x, live[0], MASKED)


@triton.jit
def fields_of(
    buffers, where, live, tables, SWEEP: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Load the fields of a value; behind them the addresses of its tables."""
    out = ()
    for i in tl.static_range(len(VALUE.fields)):
        out = out + (loaded(buffers[VALUE.fields[i]], where, live, SWEEP, VALUE.fields[i], MASKED),)
    for i in tl.static_range(len(VALUE.tables)):
        out = out + (tables[VALUE.tables[i]],)
    return out


@triton.jit
def root_of(fields, VALUE: tl.constexpr):
    """The root of a value."""
    return VALUE.codec.root(*fields)


@triton.jit
def given(
    buffers, where, live, tables, SWEEP: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """A value as its tile function gets it."""
    if VALUE.absent:
        fields = (tl.full(live[0].shape, 0.0, tl.float32),)
    else:
        fields = fields_of(buffers, where, live, tables, SWEEP, VALUE, MASKED)
    if VALUE.direct:
        out = fields[0]
    elif VALUE.name == "p" or VALUE.name == "g":
        out = read((0, fields), VALUE)
    elif VALUE.base >= 0:
        of = fields_of(buffers, where, live, tables, SWEEP, SWEEP.kept(VALUE.base), MASKED)
        out = (root_of(of, SWEEP.kept(VALUE.base)), fields)
    else:
        out = (0, fields)
    return out


@triton.jit
def put_value(
    buffers, where, live, tables, x, roots, draws, SWEEP: tl.constexpr, VALUE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store a new value; the root that others are divided by, where its codec has one."""
    own = ()
    for i in tl.static_range(len(VALUE.given)):
        own = own + (loaded(buffers[VALUE.given[i]], where, live, SWEEP, VALUE.given[i], MASKED),)
    for i in tl.static_range(len(VALUE.tables)):
        own = own + (tables[VALUE.tables[i]],)
    made = encoded(x, roots, draws, live, own, VALUE, MASKED)
    for i in tl.static_range(len(VALUE.stores)):
        stored(buffers[VALUE.stores[i]], made[i], where, live, SWEEP, VALUE.stores[i], MASKED)
    if VALUE.name == "p":
        for i in tl.static_range(len(SWEEP.views)):
            put_view(buffers, made[0], where, live, SWEEP, SWEEP.view(i), MASKED)
    out = ()
    if VALUE.codec.root is not None:
        out = (made[len(VALUE.stores) + VALUE.unrounded],)
    return out


@triton.jit
def put_view(buffers, x, where, live, SWEEP: tl.constexpr, VIEW: tl.constexpr, MASKED: tl.constexpr):
    """Store a view of the new weight as it was stored; bytes of the blocks in a storage block are one word."""
    BLOCKS: tl.constexpr = x.numel // VIEW.size
    COUNT: tl.constexpr = SWEEP.block // VIEW.size
    alive = live[0]
    if MASKED:
        alive = tl.reshape(tl.broadcast_to(alive, x.shape), [BLOCKS, VIEW.size])
    y = widened(x)
    if VIEW.scale >= 0:
        scale = tl.load(buffers[VIEW.scale]).to(tl.int32, bitcast=True)
        y = y * ((254 << 23) - scale).to(tl.float32, bitcast=True)
    made = VIEW.codec.nearest(tl.reshape(y, [BLOCKS, VIEW.size]), alive, MASKED)
    stored(buffers[VIEW.stores[0]], tl.reshape(made[0], x.shape), where, live, SWEEP, VIEW.stores[0], MASKED)
    for i in tl.static_range(1, len(VIEW.stores)):
        word = made[i]
        if COUNT > 1:
            places = tl.reshape(word.to(tl.int32), [BLOCKS // COUNT, COUNT]) << (8 * tl.arange(0, COUNT))[None, :]
            word = tl.sum(places, 1)
        stored(buffers[VIEW.stores[i]], tl.reshape(word, where[1].shape), where, live, SWEEP, VIEW.stores[i], MASKED)


@triton.jit
def encode_columns(
    table, work, CODEC: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr,
    NUMEL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store a tile of a view along columns: ROWS rows, which are a block of each column, of the transposed weight.

    work     int32 (programs, 2): tensor; panel of rows * (tiles of a panel) + tile
    WIDTH    the entries of a row of the table
    CODES    the entry that is the address of codes; that of scales follows
    NUMEL    the entry that is the number of elements; that of columns follows
    ALIGNED  whether rows begin at multiples of 16 bytes
    """
    item = work + 2 * tl.program_id(0)
    row = table + WIDTH * tl.load(item).to(tl.int64)
    columns = tl.load(row + (NUMEL + 1))
    panels = tl.load(row + NUMEL) // columns // ROWS
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    panel = tl.load(item + 1) // tl.cdiv(columns, ACROSS)
    i = tl.arange(0, ROWS)
    j = tl.load(item + 1) % tl.cdiv(columns, ACROSS) * ACROSS + tl.arange(0, ACROSS)
    live = j < columns
    x = pointer(row, DTYPE, ALIGNED) + panel * ROWS * columns + (i[:, None] * columns + j[None, :])
    x = tl.trans(tl.load(x, mask=live[None, :], other=0.0))
    code, scale = CODEC.nearest(widened(x), live[:, None], False)
    codes = pointer(row + CODES, tl.uint8, ALIGNED) + panel * ROWS + (j[:, None] * (panels * ROWS) + i[None, :])
    tl.store(codes, code, mask=live[:, None])
    scales = pointer(row + (CODES + 1), tl.uint8, ALIGNED) + panel + j * panels
    tl.store(scales, tl.reshape(scale, [ACROSS]), mask=live)


@triton.jit
def encoded(x, roots, draws, live, own, VALUE: tl.constexpr, MASKED: tl.constexpr):
    """The fields of a new value, and its roots; `own`: the codec's further arguments."""
    if VALUE.guarded:
        x = tl.where(x == x, x, float("nan"))
    if VALUE.root >= 0:
        if VALUE.codec.strict:
            x = tl.div_rn(x, roots[VALUE.root])
        else:
            x = x * reciprocal(roots[VALUE.root])
    if VALUE.plus:
        x = x + 0.0
    if VALUE.word >= 0 and VALUE.codec.encode is not None:
        out = VALUE.codec.encode(x, live[0], MASKED, draws[VALUE.word], VALUE.shift, *own)
    else:
        out = VALUE.codec.nearest(x, live[0], MASKED, *own)
    return out


# -- random bits
#
# Sixteen neighbours share two hashes, and each reads one of them rotated by its own distance: a bit of a word is a sum
# of two shared bits, of which no two words, and no two bits of a word, have both in common.  So bits are pairwise
# independent, which is all that the variance of a sum of roundings asks for, at an eighth of the price of a hash each.
# The distances of eight are triangular numbers: no two pairs of neighbours are the same one apart; the second eight
# are 16 further, a difference that triangular numbers do not have.  The keys are hashes themselves and both enter
# before the first round (a key that enters between the rounds leaves windows 2 % correlated).
#
# Windows end so that nothing can walk in step with the sequence for long: under scales that move finely, endless
# golden-ratio sequences had up to three times the noise of independent bits in roots of second moments.  256 steps are
# what our narrowest field has room for (8 bits); no speed of a grid is known at which their noise is more than that of
# independent bits (tests/test_noise.py), and windows of 32 have 3 to 15 % more error in Adam's updates.


@triton.jit
def shifted(x, BY: tl.constexpr):
    """An int32 shifted right by BY bits, zeros above."""
    return (x.to(tl.uint32, bitcast=True) >> BY).to(tl.int32, bitcast=True)


@triton.jit
def word(index, step_key, stream_key, SWEEP: tl.constexpr, K: tl.constexpr):
    """Word K of 32 random bits of each element."""
    eight = shifted(index, 3)
    x = shifted(eight, 1) ^ stream_key ^ step_key & -WINDOW
    if SWEEP.recipes[K][3]:
        x = x ^ (step_key & WINDOW - 1) * M2
    if K > 0:
        x = x ^ SWEEP.recipes[K][0]
    x = x * M1
    x = (x ^ shifted(x, 16)) * M2
    x = x ^ shifted(x, 15)
    moved = x
    if not SWEEP.recipes[K][3]:
        moved = moved ^ (step_key & WINDOW - 1) * SWEEP.recipes[K][1]
        for i in tl.static_range(len(SWEEP.recipes[K][2])):
            highest = step_key & SWEEP.recipes[K][2][i][0]
            if SWEEP.recipes[K][2][i][1] >= 0:
                moved = moved ^ highest << SWEEP.recipes[K][2][i][1]
            else:
                moved = moved ^ highest >> -SWEEP.recipes[K][2][i][1]
    y = (x ^ shifted(x, 16)) * M3
    y = (y ^ shifted(y, 15)) * M1
    lane = index & 7
    return moved ^ rotl(rotl(y ^ shifted(y, 16), eight << 4), lane * (lane + 1) >> 1)


@triton.jit
def words(index, step_key, stream_key, SWEEP: tl.constexpr):
    """The words of a sweep."""
    out = ()
    for k in tl.static_range(len(SWEEP.words)):
        out = out + (word(index, step_key, stream_key, SWEEP, k),)
    return out


@triton.jit
def integer(draws, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """int32, uniform on 0 .. 2^BITS - 1: bits of a word, from SHIFT on."""
    if BITS == 32:
        out = draws
    elif SHIFT + BITS == 32:
        out = shifted(draws, SHIFT)
    elif SHIFT == 0:
        out = draws & (1 << BITS) - 1
    else:
        out = draws >> SHIFT & (1 << BITS) - 1
    return out


@triton.jit
def fraction(draws, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """int32, uniform on 0 .. 2^WIDTH - 1: the own bits on top, below them the next of the word, or half a cell."""
    if SHIFT + BITS == 32:
        out = shifted(draws, 32 - WIDTH)
    elif WIDTH == BITS:
        out = integer(draws, SHIFT, BITS)
    else:
        out = integer(draws, SHIFT, BITS) << WIDTH - BITS | 1 << WIDTH - BITS - 1
    return out


@triton.jit
def middle(draws, SHIFT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """int32, the midpoints of 2^BITS cells of 0 .. 2^WIDTH."""
    if SHIFT + BITS == 32 and WIDTH - BITS == 1:
        out = shifted(draws, SHIFT - 1) | 1
    else:
        out = integer(draws, SHIFT, BITS) << WIDTH - BITS | 1 << WIDTH - BITS - 1
    return out
