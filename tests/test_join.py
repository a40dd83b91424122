"""Records of rules and of plans, and what the runtime makes of the two: held to the spec and to the plan's storage."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from optgen.driver import load, record_text, targets, triton_text
from optgen.driver.targets import Case
from optgen.formats import Blocked, Plan, scales, softsign
from optgen.lang.spec import Spec
from optgen.lower import matrix_of, relative, untouched
from optgen.runtime import records
from optgen.runtime.records import Variant, join
from optgen.verify.differential import read_back
from tests import harness

ROOT = Path(__file__).parents[1]
SPECS, PLANS = sorted(load.entries(ROOT)), load.plans(ROOT)


def check(spec: Spec, plan: Plan) -> None:
    """Every variant of the join is what the spec and the storage of its case say."""
    joined = list(join.variants(record_text.rules(spec), record_text.plan_record(plan)))
    cases = list(targets.cases(spec, plan))
    for variant, case in zip(joined, cases, strict=True):
        assert variant.function == targets.case_name(spec, case)
        assert (variant.param, variant.small, variant.vector) == (case.param.torch, case.small, case.vector)
        compare(spec, case, variant)


def compare(spec: Spec, case: Case, variant: Variant) -> None:
    storage, eager = case.storage, variant.eager
    own = {name: f for name, f in storage.fields().items() if name not in eager.matrices}
    fields = {f.name: f for f in variant.fields if f.owner not in eager.matrices}
    assert fields.keys() == own.keys()
    for name, f in fields.items():
        made = own[name]
        bits = made.dtype.bits if made.dtype.packed else 0
        assert (f.dtype, f.width) == (made.dtype.torch, bits or 1)
        assert f.zero == (made.zero if not bits else int(made.zero) * (255 // ((1 << bits) - 1)))
        assert f.shared == (made.space != "elem")
    assert set(eager.still) == untouched(spec, storage, case.flags)
    assert eager.relative == {k: x for k, x in relative(spec, storage).items() if k not in eager.matrices}
    assert variant.matrix in ("last", matrix_of(spec, case.flags, storage))
    assert eager.early in ((), read_back(spec, storage, case.flags))
    check_noise(case, eager)


def check_noise(case: Case, eager: records.Eager) -> None:
    """Each value that is stored has its bits of a word, and no bit of a word is dealt twice."""
    storage = case.storage
    bits = {name: fmt.noise_bits for name, fmt in storage.states.items()} | {"p": storage.master.noise_bits(case.param)}
    assert eager.noise.keys() == {x for x, n in bits.items() if n and x not in {*eager.still, *eager.matrices}}
    taken = set[tuple[int, int]]()
    for name, (word, shift) in eager.noise.items():
        own = {(word, at) for at in range(shift, shift + bits[name])}
        assert not own & taken
        assert max(at for _, at in own) < 32
        taken |= own


@pytest.mark.parametrize("seed", range(2))
def test_the_join_is_what_spec_and_storage_say(seed: int) -> None:
    """Rules of each kind under drawn plans."""
    draw = random.Random(seed)
    own_matrix = "adamp", "int4_factored_split24"  # not the matrix of the plan
    for name, plan in [own_matrix, *draw.sample(list(itertools.product(SPECS, PLANS)), 23)]:
        if name != "adafactor_paper":  # whose 16 settings take as long as 16 rules
            check(load.find_spec(name, ROOT), PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_join_is_what_spec_and_storage_say(name: str) -> None:
    for plan in PLANS.values():
        check(load.find_spec(name, ROOT), plan)


def test_plans_of_a_user_are_joined_alike() -> None:
    """States that round to nearest by themselves, overrides, no small tensors."""
    mine = Plan(
        "Mine.", name="mine", small_numel=0, signed=Blocked(6, 64, softsign(1), scales.ue8m8, relative=True),
        overrides={"max_exp_avg_sq": PLANS["int8_split24"].nonneg},
    )  # fmt: skip
    check(load.find_spec("adamw", ROOT), mine)
    check(load.find_spec("lookahead_adamw", ROOT), mine)


def test_the_committed_records_are_those_that_are_joined() -> None:
    for name in ("int8_split24", "lpmm4_factor"):
        text = record_text.plan_text(PLANS[name])
        made: dict[str, Any] = {}
        exec(compile(text, name, "exec"), made)
        assert made["PLAN"] == record_text.plan_record(PLANS[name])
        assert max(map(len, text.splitlines())) <= record_text.WIDTH


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
