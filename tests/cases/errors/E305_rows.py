"""A scale per row of a state of either sign: kernels reduce new values by rows as they are, not their magnitudes."""

from dataclasses import dataclass

from optgen.formats import Format, Plan
from optgen.formats.format import Field, wide_reductions
from optgen.lang import clip, floor, maximum, row_max
from optgen.lang.values import cast
from optgen.ops import dtypes


@dataclass(frozen=True)
class Rows(Format):
    """8-bit codes under one scale per row."""

    def fields(self):
        return {"": Field(dtypes.i8), "scale": Field(dtypes.f32, space="row")}

    def encode(self, x, *, noise=None, root=None):
        top = maximum(row_max(abs(x)), 1e-30)
        return {"": cast(clip(floor(x / top * 127.0 + 0.5), -127.0, 127.0), dtypes.i8), "scale": top}

    def decode(self, parts, *, root=None):
        return cast(parts[""], dtypes.f32) * (1 / 127) * parts["scale"]


mine = Plan("8 bits by rows.", signed=Rows())


def case() -> None:
    wide_reductions(mine.signed)
