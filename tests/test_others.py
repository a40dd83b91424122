"""The runner of other packages' tests, on a made-up package; and those packages', where OPTGEN_OTHERS has checkouts."""

import json
import os
from pathlib import Path

import pytest

from tests.others import __main__ as others

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
)
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


def test_counts_and_what_has_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_up" / "theirs").mkdir(parents=True)
    (tmp_path / "made_up" / "theirs" / "test_it.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "of_made_up.py").write_text(PACKAGE, encoding="utf-8")
    (page := tmp_path / "page.md").write_text(f"before\n{others.BEGIN}old\n{others.END}after\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(others, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(others, "PAGE", page)
    monkeypatch.setattr(others, "PACKAGES", {"made_up": "of_made_up"})
    assert others.main([str(tmp_path), "--page"]) == 1
    wrong = capfd.readouterr().err
    assert "made_up, fp32: test_it.py::test_unexplained: failed, and no reason is given" in wrong
    assert "made_up, fp32: test_it.py::test_skipped: skipped, and no reason is given" in wrong
    assert "made_up, int8: '_passes' explains no test" in wrong
    kept = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["made_up"]["fp32"]
    assert (kept["passed"], kept["failed"], kept["left out"]) == (1, 2, 3)
    assert kept["kinds"] == [
        ["test_explained", 1, "theirs: a reason"],
        [r"_unwanted\[", 2, "of its own device"],
    ]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith(f"{others.END}after\n") and "old" not in text
    assert "| made_up `unknown` | fp32 | 1 | 2 | 3 |\n" in text and "- made_up, theirs: a reason (1)\n" in text


@pytest.mark.full
def test_other_packages_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "OPTGEN_OTHERS" not in os.environ:
        pytest.skip("OPTGEN_OTHERS names no folder of checkouts")
    monkeypatch.setattr(others, "RECORD", tmp_path / "record.json")
    assert others.main([os.environ["OPTGEN_OTHERS"]]) == 0
