"""Random programs agree with themselves on all backends and with an oracle in NumPy; so do those that once did not.

Eighteen are new each time: OPTGEN_SAMPLE_SEED, printed at the end of a run, repeats them.  tools/fuzz_compiler.py runs
any number of them and keeps what fails in tests/cases/programs.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from optgen.runtime.cpu import native
from tests import programs

KEPT = sorted((Path(__file__).parent / "cases" / "programs").glob("*.txt"))
KERNELS = ("triton", "cpp", "fast")
COUNT = 6

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_program_that_once_failed_is_right(path: Path, tmp_path: Path) -> None:
    programs.run(programs.read(path.read_text(encoding="utf-8")), tmp_path)


@needs_compiler
@pytest.mark.parametrize("kernels", KERNELS)
def test_fresh_programs_are_right(kernels: str, tmp_path: Path) -> None:
    """The text of a program that is not, as tests/cases/programs keeps it, is part of the error."""
    refused = []

    @settings(max_examples=COUNT, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @seed(int(os.environ["OPTGEN_SAMPLE_SEED"]) * len(KERNELS) + KERNELS.index(kernels))
    @given(programs.cases())
    def one(case: programs.Case) -> None:
        try:
            programs.run(replace(case, kernels=kernels), tmp_path)
        except programs.Refused as refusal:
            refused.append(refusal)
        except Exception as error:
            raise AssertionError(str(case)) from error

    one()
    assert len(refused) < COUNT


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("0.9 * s0", "0.8 * s0"), "reference in strict maths"),
        (("s1 * 0.9", "s1 * 0.8"), "host state s1"),
        (("if on", "if not on"), "reference in strict maths"),
        (("model_norm(g)", "norm(g) + 0 * model_norm(g)"), "reference in strict maths"),
    ],
    ids=str,
)
def test_the_oracle_notices_another_rule(
    change: tuple[str, str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is given a changed text: what it says is compared with what the program does."""
    real = programs.oracle
    changed = lambda case, *rest: real(replace(case, text=case.text.replace(*change)), *rest)  # noqa: E731
    case = programs.Case(NOTICED, shapes=((3, 70), (7,)), options={"on": True}, kernels="")
    programs.run(case, tmp_path)
    monkeypatch.setattr(programs, "oracle", changed)
    with pytest.raises(AssertionError, match=complaint):
        programs.run(case, tmp_path)


NOTICED = """from optgen.formats import Plan
from optgen.lang import flag, hyper, model_norm, optimizer, scalar, state


@optimizer()
def drawn(p, g, s0=state(init=1.0), s1=scalar(1.0), *, lr=hyper(1e-2, ge=0), on=flag(False)):
    s0 = 0.9 * s0 + 0.1 * g
    s1 = s1 * 0.9
    size = model_norm(g)
    if on:
        p = p - lr * s1 * s0 * size
    return p, s0, s1


plan = Plan("fp32")
"""
