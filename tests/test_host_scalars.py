"""Host scalars never raise in the middle of a training run: what overflows is an infinity."""

from __future__ import annotations

import inspect
import math

import pytest

import optgen
from optgen.runtime import plans, scalars


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (scalars.divide(1.0, 0.0), math.inf),
        (scalars.divide(-1.0, 0.0), -math.inf),
        (scalars.divide(-1.0, -0.0), math.inf),
        (scalars.power(0.5, -2000.0), math.inf),
        (scalars.power(0.0, -1.0), math.inf),
        (scalars.power(2.0, 0.5), math.sqrt(2)),
        (scalars.cube_root(-1.0), -1.0),
        (scalars.cube_root(-math.inf), -math.inf),
        (scalars.exp(1e4), math.inf),
        (scalars.log(0.0), -math.inf),
        (scalars.floor(-0.5), -1.0),
        (scalars.floor(math.inf), math.inf),
        (scalars.root(4.0), 2.0),
    ],
)
def test_ieee(got: float, wanted: float) -> None:
    assert got == wanted


@pytest.mark.parametrize(
    "got", [scalars.divide(0.0, 0.0), scalars.power(-2.0, 0.5), scalars.log(-1.0), scalars.root(-1.0)]
)
def test_undefined_is_nan(got: float) -> None:
    assert math.isnan(got)


def test_what_several_scalars_share_is_computed_once() -> None:
    """A power of the step stands in AdamW's functions once each, however many scalars are made of it."""
    cls = optgen.compile("adamw", plan="int8_split24")
    for variant in plans.load(cls, "int8_split24").VARIANTS[:4]:
        for kernel in (False, True):
            text = inspect.getsource(variant.host_for(kernel)[0])
            assert text.count("beta1**step") == text.count("beta2**step") == 1, text
