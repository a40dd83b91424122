"""C++ kernels written once per rule and codecs once per plan, joined at first use: strict bits of the reference.

The packages still hold kernels of pairs; these are not used there yet (backends/cpp_text.py).
"""

from __future__ import annotations

import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from optgen.driver import cpp_text, kernel_text, record_text, targets
from optgen.runtime.cpu import join, native
from optgen.runtime.layout import plans
from optgen.runtime.records import Rule, Variant
from tests import harness, product, test_cpp_strict

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")

CASES = [
    *(("adamw", plan, "bfloat16", {}) for plan in ("bf16_kahan", "int8_split24", "int4_split24", "flashoptim")),
    ("adamw", "fp32", "float32", {}),
    ("adamw", "int8_split24", "float16", {"amsgrad": True}),
    ("lion", "int8_split24", "bfloat16", {}),
    ("sgd", "int8_rn_split24", "bfloat16", {"has_momentum": True, "nesterov": True}),
]
RULES = ("adamw", "lion", "sgd", "adan", "adamax", "radam", "yogi", "rmsprop")
WHOLE = ("lpmm4", "lpmm4_factor", "int4_factored_split24", "int5_factored_split24")
"""Plans that keep a state as a whole."""
EVERY = [(rule, plan, "bfloat16", {}) for rule in RULES for plan in product.PLANS if plan not in WHOLE]


class Joined(harness.Pair):
    """A pair whose C++ kernel is joined from the texts of its rule and of its plan."""

    @cached_property
    def records(self) -> tuple[Variant, Rule]:
        assert self.case is not None
        steps: dict[str, Any] = {}
        exec(compile(kernel_text.record_text(self.spec, "strict"), "kernels", "exec"), steps)
        plan = record_text.plan_record(self.case.storage.plan)
        variants = plans.with_steps(record_text.rules(self.spec)[1], steps["RULES"], plan)
        variant = next(v for v in variants if v.function == targets.case_name(self.spec, self.case))
        assert variant.single is not None
        return variant, variant.single

    @cached_property
    def source(self) -> str:
        assert self.case is not None
        codecs = cpp_text.codec_text(self.case.storage.plan, "strict")
        text = join.source(*self.records, cpp_text.rule_text(self.spec, "strict"), codecs)
        return text.replace(f"using {join.KERNEL} =", "using f =")

    def scalars(self, which: str, step: int, hypers: Any) -> tuple[float, ...]:
        if which != "kernel":
            return super().scalars(which, step, hypers)
        program, rule = self.kernels.program, self.records[1]
        values = {h.name: h.default for h in self.spec.hypers} | dict(program.host_states) | dict(hypers)
        return rule.host(step, 1.0, **values)[: len(rule.scalars)]


def check(rule: str, plan: str, param: str, flags: dict[str, bool], isa: str, folder: Path) -> None:
    spec = harness.spec_of(rule)
    pair = Joined(spec, harness.schedule(spec, harness.plan_of(plan), param, "strict", flags), folder)
    test_cpp_strict.steps(pair, param, param, isa, 2, zlib.crc32(f"{rule} {plan}".encode()))


@pytest.mark.parametrize(("rule", "plan", "param", "flags"), CASES, ids=str)
def test_a_joined_kernel_gives_the_bits_of_the_reference(
    rule: str, plan: str, param: str, flags: dict[str, bool], tmp_path: Path
) -> None:
    isas = test_cpp_strict.ISAS
    check(rule, plan, param, flags, isas[zlib.crc32(f"{rule} {plan}".encode()) % len(isas)].name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("isa", [isa.name for isa in test_cpp_strict.ISAS])
@pytest.mark.parametrize(("rule", "plan", "param", "flags"), EVERY, ids=str)
def test_every_joined_kernel_gives_the_bits_of_the_reference(
    rule: str, plan: str, param: str, flags: dict[str, bool], isa: str, tmp_path: Path
) -> None:
    check(rule, plan, param, flags, isa, tmp_path)
