"""The runner of other packages' tests, on a made-up package; and those packages', where OPTGEN_OTHERS has checkouts."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optgen
from optgen import optim
from tests.others import __main__ as others
from tests.others import emerging
from tests.test_migration import SECTIONS

PACKAGE = """
from tests.others import Suite

def install(plan):
    import builtins
    builtins.installed = plan

SUITES = (
    Suite("fp32", "theirs", ("test_it.py",), {r"cuda": "cpu"}, {"test_explained": "theirs: a reason"},
          {r"_unwanted\\[": "of its own device"}),
    Suite("int8", "theirs", ("test_it.py",), {r"cuda": "cpu"}, {"test_explained": "", "_passes": "stale"},
          {"_unwanted|_unexplained": "not today"}),
    Suite("int8", "theirs", ("test_ranks.py",), kind="two ranks", ranks=2),
)
FILES_LEFT_OUT = {"theirs: no optimizers": "test_data.py of/test_data.py", "ours: none": "test_gone.py test_it.py"}
"""
TESTS = """
import pytest

def test_passes():
    assert "cuda" == "c" "pu" and installed in ("fp32", "int8")

def test_explained():
    assert False

def test_unexplained():
    assert False

def test_skipped():
    pytest.skip()

@pytest.mark.parametrize("size", [1, 2])
def test_unwanted(size):
    raise SystemExit
"""

OF_RANKS = """
import torch.distributed as dist

def test_on_both():
    assert dist.get_world_size() == 2

def test_on_one():
    assert dist.get_rank() == 0
"""


def test_counts_and_what_has_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_up" / "theirs").mkdir(parents=True)
    (tmp_path / "made_up" / "theirs" / "test_it.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "made_up" / "theirs" / "test_ranks.py").write_text(OF_RANKS, encoding="utf-8")
    for name in ("test_data.py", "test_new.py", "of/test_data.py", "of/reference.py"):
        (path := tmp_path / "made_up" / "theirs" / name).parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit")
    (tmp_path / "of_made_up.py").write_text(PACKAGE, encoding="utf-8")
    (page := tmp_path / "page.md").write_text(f"before\n{others.BEGIN}old\n{others.END}after\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(others, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(others, "PAGE", page)
    monkeypatch.setattr(others, "REASONS", reasons := tmp_path / "reasons.md")
    monkeypatch.setattr(others, "PACKAGES", {"made_up": "of_made_up"})
    assert others.main([str(tmp_path), "--page"]) == 1
    wrong = capfd.readouterr().err
    assert "made_up, fp32: test_it.py::test_unexplained: failed, and no reason is given" in wrong
    assert "made_up, fp32: test_it.py::test_skipped: skipped, and no reason is given" in wrong
    assert "made_up, int8: '_passes' explains no test" in wrong
    assert "made_up, int8, two ranks: test_ranks.py::test_on_one: failed" in wrong and "test_on_both" not in wrong
    assert "made_up: test_new.py is not run, and FILES_LEFT_OUT has no reason" in wrong and "test_data" not in wrong
    assert "made_up: test_it.py of FILES_LEFT_OUT is run" in wrong and "reference" not in wrong
    assert "made_up: test_gone.py of FILES_LEFT_OUT is not there" in wrong
    kept = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["made_up"]["fp32"]
    assert (kept["passed"], kept["failed"], kept["left out"]) == (1, 2, 3)
    assert kept["kinds"] == [
        ["test_explained", 1, "theirs: a reason"],
        [r"_unwanted\[", 2, "of its own device"],
    ]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith(f"{others.END}after\n") and "old" not in text
    assert "| made_up unknown | `fp32` | 1 | 2 | 3 |\n" in text
    text = reasons.read_text(encoding="utf-8")
    assert "| made_up | theirs: a reason | 1 |\n" in text
    assert "| made_up | theirs: no optimizers | 2 |\n| made_up | ours: none | 1 |\n" in text


def checkouts() -> Path:
    if "OPTGEN_OTHERS" not in os.environ:
        pytest.skip("OPTGEN_OTHERS names no folder of checkouts")
    return Path(os.environ["OPTGEN_OTHERS"])


@pytest.mark.full
def test_other_packages_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "RECORD", tmp_path / "record.json")
    assert others.main([str(checkouts())]) == 0


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 10])
def test_soap_of_emerging_is_ours_but_for_what_its_spec_says(size: int) -> None:
    """Matrices have full rank: in directions without a gradient, both divide a rounding error by its own size."""
    path = checkouts() / "emerging" / "tests" / "soap_reference.py"
    made = importlib.util.spec_from_file_location("soap_reference", path)
    assert made and made.loader
    made.loader.exec_module(module := importlib.util.module_from_spec(made))
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(size, size)) for _ in range(2))
    options: Any = {"lr": 0.5, "betas": (0.75, 0.75), "shampoo_beta": 0.5, "eps": 1e-3, "weight_decay": 0.125}
    steps = (
        optgen.compile(emerging.soap_reference, "fp32")([ours], **options),
        module.ReferenceSoap([theirs], **options, precondition_frequency=1),
    )
    for _ in range(7):
        ours.grad = torch.randn(size, size, generator=draw)
        theirs.grad = ours.grad.clone()
        for optimizer in steps:
            optimizer.step()
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


ON_CPU = {
    r"torch\.cuda\.is_available\(\)": "True",
    r"not data\.is_cuda": "False",
    r"torch\.cuda\.get_device_properties\(device\)\.multi_processor_count": "1",
    r"libdevice\.copysign\(rounded_val, scaled_e\)": "tl.where(scaled_e < 0, -rounded_val, rounded_val)",
    r"\[2, 4, 8\]": "[2]",
    r"\[4, 8\]": "[4]",
}
"""What FlashOptim's module must read to make its eager steps on a CPU, with kernels that Triton interprets."""


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rule", "options"), [("AdamW", {}), ("Lion", {}), ("SGD", {"momentum": 0.9})])
def test_checkpoints_of_flashoptim_both_ways(
    rule: str, options: dict[str, float], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin with the same bits, and make the same steps but for the order of Adam's operations: a code or two."""
    text = (checkouts() / "flashoptim" / "flashoptim" / "optimizers.py").read_text(encoding="utf-8")
    for pattern, new in ON_CPU.items():
        text = re.sub(pattern, new, text)
    (tmp_path / "flashoptim_on_cpu.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashoptim_on_cpu", raising=False)
    package: Any = importlib.import_module("flashoptim_on_cpu")
    draw = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(70, 64, generator=draw).to(dtype) for _ in range(9))

    def made(cls: Any, weight: Tensor, **more: Any) -> Any:
        return cls([nn.Parameter(weight.detach().clone())], lr=1e-3, **more, **options)

    def step(some: Any, count: slice) -> None:
        for g in grads[count]:
            some.param_groups[0]["params"][0].grad = g * 0.01
            some.step()

    def compare(theirs: Any, ours: Any, codes: int, share: float = 2.0**-21) -> None:
        (p, entry), dense = next(iter(theirs.state.items())), ours.dense_state_dict()["state"][0]
        want = package.reconstruct_fp32_param(p.detach(), entry["error_bits"])
        relative = (codes + 1) * 2.0 ** -(8 if dtype == torch.bfloat16 else 11) / 127
        absolute = 2.0**-33 + codes * 1e-3 / 127  # what a code of a state moves a step by
        torch.testing.assert_close(ours.full_weights()[0], want, rtol=relative, atol=absolute)
        for name in dense.keys() - {"step"}:
            error = (dense[name] - entry[name].materialize()).abs().max()
            assert error <= share * dense[name].abs().max(), name

    theirs = made(getattr(package, f"Flash{rule}"), start, compress_state_dict=True, fused=False)
    step(theirs, slice(4))
    ours = made(getattr(optim, rule), theirs.param_groups[0]["params"][0], plan="flashoptim")
    ours.load_state_dict(theirs.state_dict())
    compare(theirs, ours, 0)  # but for the roundings of a quotient, a curve and a square
    step(theirs, slice(4, 8))
    step(ours, slice(4, 8))
    compare(theirs, ours, *((2, 2 / 127) if rule == "AdamW" else (0,)))

    back = made(getattr(package, f"Flash{rule}"), ours.param_groups[0]["params"][0], fused=False)
    there = {"opt": ours, "torch": torch}
    exec(next(block for _, block in SECTIONS["flashoptim: FlashAdamW"] if "::quantized" in block), there)
    back.load_state_dict(there["saved"])
    compare(back, ours, 0, *((2.0**-7,) if dtype == torch.bfloat16 else ()))  # of a scale, whose square is a moment's
    step(back, slice(4))
