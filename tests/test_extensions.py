"""What a stranger adds to the package in one file of their own, without a change to it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from optgen.driver.explain import UNKNOWN, memory
from optgen.formats import Plan
from optgen.ops import dtypes
from optgen.verify import bounds, lint
from optgen.verify.differential import stored
from optgen.verify.intervals import Interval
from specs.adamw import adamw

FORMAT = '''
from dataclasses import dataclass

from optgen.formats import Field, Format
from optgen.formats.bound import Bound
from optgen.lang.values import bits, cast, from_bits
from optgen.ops.dtypes import i16, i32


@dataclass(frozen=True)
class Cut(Format):
    """bf16 by cutting the low half off, as the earliest ones were."""

    def fields(self):
        return {"": Field(i16)}

    def encode(self, x, *, noise=None, root=None):
        return {"": cast(bits(x) >> 16, i16)}

    def decode(self, parts, *, root=None):
        return from_bits(cast(parts[""], i32) << 16)


@dataclass(frozen=True)
class Bounded(Cut):
    """The same, and what it is off by."""

    def bound(self):
        return Bound(2.0**-7, "value", "2^-126 <= |x|", absolute=2.0**-133)
'''


def module(folder: Path, name: str, text: str) -> ModuleType:
    """Write a stranger's file and import it."""
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_format_in_one_file_states_its_bound_or_has_none(tmp_path: Path) -> None:
    mine = module(tmp_path, "cut", FORMAT)
    for fmt, error in ((mine.Cut(), UNKNOWN), (mine.Bounded(), "0.00781 |x|")):
        plan = Plan("Cut moments.", name="cut", signed=fmt, nonneg=fmt)
        storage = plan.storage(adamw.present({"amsgrad": False}), dtypes.f32, False)
        row = next(row for row in memory(adamw, storage) if row.name == "exp_avg")
        assert (row.error, row.bytes) == (error, 2.0)
        # What is not stated is measured.
        findings = lint.lint({"exp_avg_sq": lint.Recurrence("ema", 0.999)}, storage)
        assert [f.code for f in findings if f.severity == "error"] == ["L2"]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator) * torch.logspace(-44, 38, 64)
    x[1] = 0.0
    kept = mine.Cut().decode(mine.Cut().encode(x)).double()
    point = Interval.point(x)
    assert not stored(mine.Cut(), point).known.any()
    found = stored(mine.Bounded(), point)
    assert found.known.all() and found.contains(kept).all()
    assert (found.hi - found.lo <= 2.0**-5 * x.double().abs() + 2.0**-132).all()


def test_what_a_format_states_does_not_hold_of_one_that_encodes_otherwise(tmp_path: Path) -> None:
    mine = module(tmp_path, "cut", FORMAT)

    class Other(mine.Bounded):  # type: ignore[misc, name-defined]
        def decode(self, parts: object, *, root: object = None) -> object:
            return super().decode(parts) * 2.0

    assert mine.Bounded().bound() is not None
    with pytest.raises(bounds.UnknownBound, match="Other states none"):
        bounds.one_step_bound(Other())
