"""The closed table of errors: every code has a case, every case prints exactly its golden text.

UPDATE_GOLDEN=1 rewrites the texts.
"""

import os
from pathlib import Path

import pytest

from optgen.base.errors import TABLE, UserError, did_you_mean
from optgen.base.loc import Loc
from optgen.driver.load import find_spec
from optgen.driver.project import read_config
from tests.error_cases import CALLS, PRELUDE, TEXTS

GOLDEN = Path(__file__).parent / "cases/errors"


@pytest.mark.parametrize("name", [*TEXTS, *CALLS])
def test_prints_its_golden_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, call = CALLS[name] if name in CALLS else ({f"specs/{name}.py": PRELUDE + TEXTS[name]}, None)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        call() if call else find_spec(f"specs/{name}.py").check()
    golden, text = GOLDEN / f"{name}.txt", f"{caught.value}\n"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    assert caught.value.code == name.split("_")[0]
    assert text == golden.read_text()


def test_every_code_has_a_case_and_every_case_a_code() -> None:
    assert {name.split("_")[0] for name in [*TEXTS, *CALLS]} == set(TABLE)
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {*TEXTS, *CALLS}


def test_columns_of_toml_are_characters(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.optgen]\n"ééé" = 2 x\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"pyproject.toml:2:11\n  2 \| \"ééé\" = 2 x\n    \|           \^\n"):
        read_config(tmp_path)


def test_a_notebook_shows_the_error_without_a_traceback() -> None:
    error = UserError("E101", loc=Loc(__file__, 1), what="a condition")
    assert error._render_traceback_() == str(error).splitlines()


def test_did_you_mean() -> None:
    assert did_you_mean("amsgrd", ["amsgrad", "nesterov"]) == "did you mean 'amsgrad'?"
    assert did_you_mean("SGD", ["sgd", "sgdw"]) == "did you mean 'sgd'?"
    assert did_you_mean("AdamW", ["adam", "adamw"]) == "did you mean 'adamw'?"
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b"
    assert did_you_mean("zzz", []) == ""
