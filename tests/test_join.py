"""Kernels that are made of the records of rules and of plans."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from optgen.driver import triton_text
from tests import harness

STALE = """
import tempfile
from pathlib import Path
from optgen.driver import triton_text
from tests import harness

def keys(change):
    folder = Path(tempfile.mkdtemp())
    module = lambda name, text: harness.module(folder, name, change(text) if name == "codecs" else text)
    spec, plan = harness.spec_of("lion"), harness.plan_of("int8_split24")
    _, kernels = triton_text.joined(spec, plan, "fast", module)
    return kernels.CONSTANTS["lion_bfloat16"]["SWEEP"].cache_key

same, again, other = keys(str), keys(str), keys(lambda text: text.replace("3200.0", "3201.0"))
assert same == again != other
"""


def test_triton_keeps_a_compiled_kernel_under_the_text_of_its_codecs(compiling: dict[str, str]) -> None:
    """On disk a constant counts by its `cache_key`: a codec whose text has changed makes another kernel."""
    harness.python(STALE, env=compiling)


@pytest.mark.parametrize("rule", ["lamb", "stable_adamw"])
def test_a_new_state_is_not_read_back_where_it_is_kept_as_a_whole(rule: str, tmp_path: Path) -> None:
    """These rules read the new second moment back where a plan stores it element by element, small tensors' too."""
    module = functools.partial(harness.module, tmp_path)
    pair, kernels = triton_text.joined(harness.spec_of(rule), harness.plan_of("lpmm4"), "fast", module)
    for variant in pair.variants:
        assert variant.rule.early == variant.eager.early
        assert bool(variant.rule.early) is not bool(variant.eager.whole)
        for stage in variant.stages:
            assert stage.space != "elem" or hasattr(kernels, stage.kernel)
