"""`optgen build --backend cpp`: printed and compiled, so that the first step finds its kernels."""

from pathlib import Path

import pytest
import torch

from optgen.driver import ahead
from optgen.driver.build import Request, build
from optgen.runtime.cpu import cpu, native

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


def test_the_first_step_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path / "kernels"))
    outcome = build(Request(("lion",), ("int8_split24",), ("cpp",)))
    assert outcome.packages == ["lion/int8_split24"]
    jobs = ahead.kernels_of(outcome.folder, outcome.packages)
    assert {job.name for job in jobs} >= {"lion_bfloat16-bfloat16", "lion_float32-float32", "lion_float16-float16"}
    plan = ahead.pair_of(outcome.folder, "lion", "int8_split24")
    one = cpu.job(plan, next(v for v in plan.variants if v.function == "lion_bfloat16"), torch.bfloat16)
    assert one in jobs
    assert ahead.compile_ahead([one], lambda items, total: items) == 1
    native._known.clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("compiled again"))
    (found,) = native.load([one])
    assert not isinstance(found, native.Unavailable)
