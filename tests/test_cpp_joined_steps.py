"""C++ kernels of steps in several stages, joined from a rule's functions and a plan's codecs: the reference's bits.

The packages still hold kernels of pairs; these are not used there yet (backends/cpp_step_text.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from unittest import mock

import pytest

import optgen
from optgen.driver import cpp_text
from optgen.driver.project import Maths
from optgen.runtime.cpu import cpu, join, native
from optgen.runtime.records import Variant, dtype_name
from optgen.runtime.work.bucket import Bucket
from tests import harness, product
from tests.test_cpp_stages import ISAS, RULES, SHAPES, compare, dtype_for, train

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

CASES = [
    *((rule, plan) for rule in ("came", "lamb", "sm3", "muon") for plan in ("fp32", "int8_split24")),
    *(("adamp", plan) for plan in ("int8_split24", "int4_factored_split24")),
    ("adamw", "lpmm4"),
]
WHOLE = ("lpmm4", "lpmm4_factor", "int4_factored_split24", "int5_factored_split24")
EVERY = [
    *((rule, plan) for rule in ("adamp", "came", "lamb", "sgdp", *RULES) for plan in product.PLANS),
    *((rule, plan) for rule in ("adamw", "lion", "adan", "ademamix", "yogi") for plan in WHOLE),
]


class Joined:
    """Compiles steps of several stages from the texts of a rule and of a plan, in the place of a package's kernels."""

    def __init__(self, rule: str, plan: str, maths: Maths = "strict") -> None:
        self.spec, self.plan, self.maths = harness.spec_of(rule), harness.plan_of(plan), maths
        self.compiled: list[str] = []

    def source(self, variant: Variant) -> str:
        assert variant.rule is not None
        text = cpp_text.rule_text(self.spec, self.maths, self.plan if variant.own else None)
        return join.steps_source(variant, variant.rule, text, cpp_text.codec_text(self.plan, self.maths))

    def job(self, bucket: Bucket) -> native.Job:
        variant, name = bucket.variant, dtype_name(bucket.grad_dtype)
        if not variant.stages:
            return cpu.job(bucket.plan, variant.kernel_name, bucket.grad_dtype)
        self.compiled.append(variant.function)
        macros = f"OPTGEN_KERNEL={join.KERNEL}", f"OPTGEN_GRAD={name}"
        return native.Job(f"{variant.function}-{name}", self.source(variant), macros)

    def kernels(self, buckets: Sequence[Bucket]) -> list[cpu.Step | native.Unavailable]:
        pairs = zip(native.load([self.job(b) for b in buckets]), buckets, strict=True)
        return [made if isinstance(made, native.Unavailable) else cpu._function(made, b) for made, b in pairs]


def check(rule: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTGEN_ISA", ISAS[zlib.crc32(f"{rule} {plan}".encode()) % len(ISAS)])
    cls = optgen.compile(rule, plan, maths="strict")
    joined = Joined(rule, plan)
    with mock.patch.object(cpu, "kernels", joined.kernels):
        theirs = train(cls, "cpp", dtype_for(plan), plan, SHAPES)
    compare(train(cls, "reference", dtype_for(plan), plan, SHAPES), theirs, SHAPES)
    assert joined.compiled


@pytest.mark.parametrize(("rule", "plan"), CASES, ids=str)
def test_a_joined_step_gives_the_bits_of_the_reference(rule: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(rule, plan, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(("rule", "plan"), EVERY, ids=str)
def test_every_joined_step_gives_the_bits_of_the_reference(
    rule: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(rule, plan, monkeypatch)
