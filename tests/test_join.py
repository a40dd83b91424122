"""Records of rules and of plans, and what the runtime makes of the two: held to what the compiler lowers."""

from __future__ import annotations

import functools
import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest

from optgen import passes
from optgen.driver import cpp_text, load, record_text, targets, triton_text
from optgen.driver.targets import Case
from optgen.formats import Blocked, Plan, scales, softsign
from optgen.formats.of_matrices import OfMatrix
from optgen.formats.plan import field_names
from optgen.ir.node import postorder
from optgen.lang.spec import Spec
from optgen.lower import lower, matrix_of, needs_matrix
from optgen.ops import spaces
from optgen.ops.prims import MATRIX_OPS
from optgen.runtime import records
from optgen.runtime.cpu import cpu
from optgen.runtime.records import Variant, join
from tests import harness

ROOT = Path(__file__).parents[1]
SPECS, PLANS = sorted(load.entries(ROOT)), load.plans(ROOT)


def check(spec: Spec, plan: Plan) -> None:
    """Every variant of the join is what the program of its case says."""
    joined = list(join.variants(record_text.rules(spec), record_text.plan_record(plan)))
    cases = list(targets.cases(spec, plan))
    for variant, case in zip(joined, cases, strict=True):
        assert variant.function == targets.case_name(spec, case)
        assert (variant.param, variant.small, variant.vector) == (case.param.torch, case.small, case.vector)
        compare(spec, case, variant)


def compare(spec: Spec, case: Case, variant: Variant) -> None:
    program, storage, eager = lower(spec, case.flags, case.storage), case.storage, variant.eager
    buffers = [b for b in program.buffers if b.role not in ("param", "grad", "draw")]
    # Matrix states in few bits are fp32 to programs: torch encodes them around whole stages.
    formats = {b.owner: storage.states[b.owner] for b in buffers if isinstance(storage.states.get(b.owner), OfMatrix)}
    assert {x: fmt.trait for x, fmt in formats.items()} == eager.matrices
    fields = [f for f in variant.fields if f.owner not in formats]
    buffers = [b for b in buffers if b.owner not in formats]
    assert [f.name for f in fields] == [b.name for b in buffers]
    stored, elements = storage.fields(), {s.name for s in spec.states if s.space == spaces.elem}
    nonneg = {next(iter(field_names(s, storage.states[s].fields()).values())) for s in storage.nonneg}
    for b, f in zip(buffers, fields, strict=True):
        own, few = stored[b.name], b.space.name in spaces.SMALL | spaces.MATRICES
        bits = b.dtype.bits if b.dtype.packed else 0
        assert (f.dtype, f.state, f.width) == (b.dtype.torch, b.owner, bits or 1)
        assert f.per == (8 if bits else b.space.size or 1)
        assert f.zero == own.zero if not bits else f.zero == int(own.zero) * (255 // ((1 << bits) - 1))
        assert f.space == (b.space.name if few else "elem")
        assert f.shared == (few and b.owner in elements)
        assert f.nonneg == ((own.nonneg and b.dtype.is_float) or b.name in nonneg)
        assert (f.least, f.most, f.low) == ((own.least, own.most, own.low) if own.most is not None else (0, None, 0))
    assert variant.block == program.block
    assert variant.host_states == program.host_states
    nodes = list(postorder(program.roots()))
    draws = {n.attr for n in nodes if n.op == "key"}
    assert {x for x, fmt in formats.items() if fmt.rounding == "stochastic"} == eager.random
    own = tuple(b.owner for b in program.buffers if b.role == "draw")
    assert set(eager.draws) == set(own)
    assert bool(draws) == bool(eager.words) and variant.stochastic == bool(draws or eager.random or own)
    few = ({n.space.name for n in nodes} | {b.space.name for b in program.buffers}) & spaces.SMALL
    few |= {"call"} if any(n.op in MATRIX_OPS for n in nodes) else set()
    elsewhere = needs_matrix(spec, case.flags) and few.isdisjoint({"row", "col", "mat", "call"})
    assert variant.rows == elsewhere
    assert variant.matrix == (matrix_of(spec, case.flags, storage) if elsewhere or few else "last")
    fast = passes.cut(passes.linear(program))
    # A step has two texts: where one of its early states is kept as a whole none is read back.
    assert set(eager.early) == set(fast.early) or (eager.whole and not eager.early)
    written_to = {b.owner for b in program.buffers if b.writes}
    assert set(eager.still) == set(storage.states) - written_to
    relative = {name for name, fmt in storage.states.items() if fmt.relative}
    assert set(eager.relative) == relative
    check_noise(case, program, eager)


def check_noise(case: Case, program: Any, eager: records.Eager) -> None:
    """A store reads the words that its value is dealt, and no bit of a word is dealt twice."""
    storage = case.storage
    bits = {name: fmt.noise_bits for name, fmt in storage.states.items()} | {"p": storage.master.noise_bits(case.param)}
    assert set(eager.noise) == {name for name, n in bits.items() if n and name not in eager.still}
    taken = set[tuple[int, int]]()
    for name, (word, shift) in eager.noise.items():
        own = {(word, at) for at in range(shift, shift + bits[name])}
        assert not own & taken
        assert max(at for _, at in own) < 32
        taken |= own
    for s in program.stores:
        drawn = any(n.op == "key" for n in postorder([s.node]))
        owner = program.buffer(s.buffer).owner
        # A code of a relative state reads the root of the state that it is divided by.
        assert drawn <= (owner in eager.noise or eager.relative.get(owner) in eager.noise), s.buffer


@pytest.mark.parametrize("seed", range(2))
def test_the_join_is_what_the_compiler_lowers(seed: int) -> None:
    """Rules of each kind under drawn plans."""
    draw = random.Random(seed)
    own_matrix = "adamp", "int4_factored_split24"  # not the matrix of the plan
    for name, plan in [own_matrix, *draw.sample(list(itertools.product(SPECS, PLANS)), 23)]:
        if name != "adafactor_paper":  # whose 16 settings take as long as 16 rules
            check(load.find_spec(name, ROOT), PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_join_is_what_the_compiler_lowers(name: str) -> None:
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


@pytest.mark.parametrize("name", PLANS)
def test_codecs_that_stand_in_the_files_of_other_plans_are_found(name: str) -> None:
    """Compare the structs that are compiled with those of a plan that shares none."""
    found = cpu.codec_text(ROOT / "optgen" / "plans" / name / cpp_text.CODECS)
    structs = [
        re.findall(r"^struct .*?^};$", x, re.M | re.S) for x in (found, cpp_text.codec_text(PLANS[name], "fast"))
    ]
    one, other = (sorted(" ".join(struct.split()) for struct in some) for some in structs)
    assert one == other


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
