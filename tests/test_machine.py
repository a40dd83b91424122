"""Drawn scripts: an optimizer beside its twin that only steps, through everything between, around and within steps."""

import importlib.util
import itertools
import os
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from optgen.runtime.cpu import native
from tests.machine import LOADS, Cell, Machine

RULES = (
    "adamw", "adam", "sgd", "lion", "nadam", "rmsprop", "adopt", "ademamix",  # elements, clocks
    "lamb", "adafactor", "came", "adam_mini",  # norms and means
    "muon", "soap", "shampoo", "psgd_kron", "dion", "galore",  # matrices, bases, low rank
    "normuon", "adamuon", "polargrad", "soap_muon", "adago", "by_matrix",  # rates beside lr, numbers of a matrix
    "prodigy", "dadapt_adam",  # sums over the model
    "sophia", "adahessian",  # inputs
    "schedule_free_adamw", "ema(adamw)", "averaged(sgd)", "lookahead(adamw)", "clipped(adamw)", "warmed_up(adamw)",
    "sam(adamw)", "gsam(adamw)", "several",
)  # fmt: skip
PLANS = (
    "fp32", "bf16", "bf16_sr", "fp32_master", "split32", "int8_split24", "int4_split24",
    "int8", "int8_rn_split24", "flashoptim", "bnb8", "torchao4", "torchao_fp8", "lpmm4",
    "lpmm4_factor", "int5_factored_split24",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")

CELLS: dict[str, st.SearchStrategy[Cell]] = {
    "reference": st.builds(
        Cell, st.sampled_from(RULES), st.sampled_from(PLANS), st.sampled_from(DTYPES), named=st.booleans(),
        mixed=st.booleans(),
    ),
    "kept": st.builds(
        Cell, st.sampled_from(["schedule_free_adamw", "adafactor", "ema(adamw)", "averaged(sgd)", "gpa(adamw)"]),
        st.sampled_from([plan for plan in PLANS if "split" in plan]), st.just("bfloat16"), named=st.booleans(),
        mixed=st.booleans(),
    ),
    "cpp": st.builds(
        Cell, st.sampled_from(["adamw", "lamb", "schedule_free_adamw"]), st.just("int8_split24"), st.just("bfloat16"),
        st.just("cpp"), named=st.booleans(), mixed=st.booleans(),
    ),
    "viewed": st.builds(
        Cell, st.sampled_from(["adamw", "lamb", "muon", "came", "schedule_free_adamw", "ema(adamw)"]),
        st.just("viewed"), st.sampled_from(["float32", "bfloat16"]), st.sampled_from(["reference", "cpp"]),
        named=st.booleans(), mixed=st.booleans(),
    ),
    "coded": st.builds(
        Cell, st.sampled_from(["adamw", "lamb", "muon", "schedule_free_adamw", "ema(adamw)", "lookahead(adamw)"]),
        st.just("coded"), st.just("bfloat16"), st.sampled_from(["reference", "cpp"]), named=st.booleans(),
    ),
    "triton": st.builds(
        Cell, st.just("lion"), st.sampled_from(["fp32", "int8_split24"]), st.just("bfloat16"), st.just("triton"),
    ),
}  # fmt: skip
"""What is drawn of each kind; kernels of few rules, since they take seconds to compile and to interpret."""

EXAMPLES = {"reference": 30, "kept": 10, "cpp": 10, "viewed": 8, "coded": 8, "triton": 4}


def run(kind: str, seed: int | None = None, **changed: Any) -> None:
    """Run examples of a kind: those of every day, or those of a seed."""
    if kind == "cpp" and native.compiler() is None or kind == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("no compiler")
    machine: Any = type("Machine", (Machine,), {"cells": CELLS[kind]})
    more = {} if seed is None else {"derandomize": False, "database": None}
    if seed is not None:
        machine = hypothesis.seed(seed)(machine)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20, **more, **changed))


@pytest.mark.long
@pytest.mark.parametrize("kind", CELLS)
def test_an_optimizer_has_the_bits_of_its_twin_that_only_steps(kind: str) -> None:
    run(kind, max_examples=EXAMPLES[kind])


@pytest.mark.full
def test_for_as_many_minutes_as_asked() -> None:
    """OPTGEN_MACHINE_MINUTES, an hour by default, from the seed OPTGEN_SAMPLE_SEED on."""
    begun, minutes = time.monotonic(), float(os.environ.get("OPTGEN_MACHINE_MINUTES", "60"))
    for number in itertools.count(int(os.environ["OPTGEN_SAMPLE_SEED"])):
        if time.monotonic() - begun > 60 * minutes:
            return
        kind = (*CELLS, "reference", "reference")[number % (len(CELLS) + 2)]
        print(f"seed {number}, {kind}", flush=True)
        run(kind, number, max_examples=EXAMPLES[kind])


EDIT = ("edit", {"kind": "zeros", "way": "copy_", "which": 0, "seed": 1})
STEP = ("backward", {"seed": 1})
REPLAYS: list[tuple[Cell, int, list[tuple[str, Any]]]] = [
    # a gradient of another dtype for the copy of a weight in host memory
    (
        Cell("adamw", "int8_split24", "bfloat16", "cpp"),
        1,
        [("offloaded", {"on": 15}), ("step", {"seed": 1, "form": "float32"})],
    ),
    # low bits of a weight that is set to 0
    *(
        (Cell("adamw", "int8_split24", "bfloat16", backend), 1, [("train", {"seed": 1, "count": 2}), EDIT])
        for backend in ("reference", "cpp")
    ),
    # weights of training, in a checkpoint that is taken in evaluation
    *(
        (cell, 1, [("train", {"seed": 1}), ("evaluation", {}), (kind, {"seed": 1, "way": way})])
        for cell in (Cell("ema(adamw)"), Cell("schedule_free_adamw", "int8_split24", "bfloat16"))
        for kind, way in [*(("resume", way) for way in LOADS), *(("copied", way) for way in ("deepcopy", "pickle"))]
        if (kind, "(" in cell.rule) != ("copied", True)
    ),
    # a step that is made once more, where gradients are of another dtype, or come later
    *(
        (Cell("adamw", "int8_split24", "bfloat16", "cpp"), 1, [("train", {"seed": 1, "count": 3} | x), ("step", then)])
        for x, then in [({}, {"seed": 1, "form": "float32"}), ({"lacking": 2}, {"seed": 1})]
    ),
    # parameters that are added, frozen and thawed while gradients are released
    (
        Cell("adamw", "int8_split24", "bfloat16"),
        1,
        [
            ("freeze", {"lacking": 1}),
            ("release", {}),
            STEP,
            ("add_group", {"seed": 2, "count": 1}),
            STEP,
            ("freeze", {"lacking": 0}),
            STEP,
            ("freeze", {"lacking": 4}),
            STEP,
            ("backward", {"seed": 3, "parts": 3}),
        ],
    ),
    # inputs of parameters without a gradient
    (Cell("adahessian"), 1, [("step", {"seed": 1, "lacking": 2}), ("copied", {"seed": 1, "way": "itself"})]),
    (Cell("gsam(adamw)"), 1, [("step", {"seed": 1, "lacking": 2}), ("copied", {"seed": 1, "way": "itself"})]),
]
"""What has failed: a cell, the seed of `start`, and operations."""


@pytest.mark.parametrize(("cell", "seed", "operations"), REPLAYS)
def test_what_failed_once(cell: Cell, seed: int, operations: list[tuple[str, dict[str, Any]]]) -> None:
    machine = Machine()
    machine.start(cell, seed)
    for name, arguments in operations:
        getattr(machine, name)(**arguments)
    machine.teardown()
