"""The bits of weights and states after five steps, of every rule: an upgrade keeps a user's numbers.

golden/bits.json has one digest for each rule under each of PLANS, which the eager reference and strict C++ kernels
share; `python -m tests.test_golden` writes it.  Products of matrices have the bits of a processor and its library: a
rule that takes them has a digest for each processor that was met.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen.by_name import class_of, list_rules
from tests.harness import param_dtype, plan_of, sampled, spec_of
from tests.product import multiplies, refusal, settings_of

pytestmark = pytest.mark.filterwarnings("ignore")

TABLE = Path(__file__).parent / "golden" / "bits.json"
PAGE = Path(__file__).parents[1] / "docs" / "reproducible.md"
PLANS = ("fp32", "bf16_sr", "int8_split24", "int4_split24", "flashoptim")
SHAPES = ((64, 80), (13, 70), (37,))
"""Of whole blocks, of rows that end within a block, of less than a block."""


@cache
def numbers(*key: object, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers between -1 and 1 that have the same bits on every processor."""
    draw = random.Random(repr(key))
    return torch.tensor([draw.randint(-(2**20), 2**20) for _ in range(torch.Size(shape).numel())]).view(shape) / 2**20


def digest(values: list[Any]) -> str:
    """Return 48 bits of the SHA-256 of tensors' bytes and other values' texts."""
    done = hashlib.sha256()
    for x in values:
        bare = x.detach().contiguous().view(-1) if isinstance(x, Tensor) else None
        done.update(str(x).encode() if bare is None else bare.view(torch.uint8).numpy().tobytes())
    return done.hexdigest()[:12]


@cache
def processor() -> str:
    """Return a digest of what this processor makes of products and decompositions."""
    x, y = numbers("x", shape=(3, 37, 37)), numbers("y", shape=(64, 80))
    made = [x @ x.mT, y @ y.T, torch.linalg.qr(x[0])[0], torch.linalg.eigh(x[0] @ x[0].T)[1]]
    return digest([torch.__version__.split("+")[0], *made])


def flags_of(rule: str) -> dict[str, bool | float]:
    """Return one setting of the options among a rule's flags that differs from the defaults, with what they need."""
    flags = {f.name: f for f in spec_of(rule).flags if not f.derived}
    chosen = {k: on for k, on in settings_of(rule)[-1] if k in flags}
    needed = {flags[k].needs: 0.5 for k, on in chosen.items() if on and flags[k].needs}
    return chosen | needed | {flags[k].excludes: 0.0 for k, on in chosen.items() if on and flags[k].excludes}


def bits(rule: str, plan: str, backend: str) -> str:
    """Return the digest of weights and states after five steps; of a plan's name with "+", under the rule's flags."""
    plan, _, flagged = plan.partition("+")
    spec, dtype = spec_of(rule), param_dtype(plan)
    made = class_of(rule) if backend == "reference" else optgen.compile(spec, plan_of(plan), maths="strict")
    weights = [nn.Parameter(numbers("p", shape=shape).to(dtype, copy=True)) for shape in SHAPES]
    opt = made(weights, plan=plan, backend=backend, **(flags_of(rule) if flagged else {}))
    for t in range(5):
        for p in weights:
            p.grad = numbers(t, shape=tuple(p.shape)).to(dtype, copy=True)
        for x in spec.inputs:
            opt.feed(**{x: {p: numbers(x, t, shape=tuple(p.shape)).to(dtype) for p in weights}})
        opt.step()
    states = [(k, opt.state[p][k]) for p in weights for k in sorted(opt.state[p])]
    return digest([*weights, *(x for pair in states for x in pair)])


def plans_of(rule: str) -> list[str]:
    flagged = ["int8_split24+flags"] if flags_of(rule) else []
    return [plan for plan in (*PLANS, *flagged) if not refusal(rule, plan.partition("+")[0])]


def kind(rule: str) -> str:
    """Return the part of the table that has a rule's digests."""
    return processor() if multiplies(rule) else "every processor"


@pytest.mark.parametrize("rule", sampled("golden", list_rules()))
def test_weights_and_states_have_the_bits_that_they_had(rule: str) -> None:
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    if kind(rule) not in known:
        pytest.skip("products have other bits on this processor: write the table before a change and compare")
    assert {plan: bits(rule, plan, "reference") for plan in plans_of(rule)} == known[kind(rule)][rule]


def test_the_page_counts_the_digests() -> None:
    parts = json.loads(TABLE.read_text(encoding="utf-8")).values()
    found = {(rule, plan) for part in parts for rule, plans in part.items() for plan in plans}
    said = re.findall(r"([\d,]+) digests", PAGE.read_text(encoding="utf-8"))
    assert [int(number.replace(",", "")) for number in said] == [len(found)]


@pytest.mark.full
@pytest.mark.parametrize("rule", list_rules())
def test_cpp_has_the_same(rule: str) -> None:
    for plan in plans_of(rule):
        assert bits(rule, plan, "cpp") == bits(rule, plan, "reference"), plan


def write() -> None:
    """Write the digests of this processor into the table."""
    known = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    for rule in list_rules():
        known.setdefault(kind(rule), {})[rule] = {plan: bits(rule, plan, "reference") for plan in plans_of(rule)}
    text = json.dumps(known, indent=0).replace('",\n', '", ').replace('{\n"', '{"').replace('"\n}', '"}')  # a line each
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
