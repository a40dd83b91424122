"""The command line: every command's words, its JSON, its exit code."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import optgen
import specs
from optgen.base import errors
from optgen.driver import cli, doctor, fuzz, load, terminal
from tests.harness import python

ROOT = Path(__file__).resolve().parent.parent

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(exit code, stdout, stderr) of a command."""

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def as_json(out: str) -> dict[str, Any]:
    """The one object that stdout holds."""
    data = json.loads(out)
    assert isinstance(data, dict)
    assert data["optgen"] == terminal.SCHEMA
    assert data["ok"] == (data["exit"] == 0)
    return data


# -- every command
def test_new_build_check_list(project: Path, run: Run) -> None:
    code, out, _ = run("new", "MyRule")
    assert (code, (project / "specs/my_rule.py").is_file()) == (0, True)
    assert "specs/my_rule.py" in out
    code, out, _ = run("build", "--json")
    data = as_json(out)
    assert (code, data["out"]) == (0, "generated")
    assert "my_rule/triton.py" in data["written"]
    code, out, _ = run("build", "--check")
    assert (code, "up to date" in out) == (0, True)
    code, out, _ = run("list", "--json")
    mine = next(s for s in as_json(out)["specs"] if s["name"] == "my_rule")
    assert (mine["class"], mine["own"]) == ("MyRule", True)
    code, out, _ = run("check")
    assert (code, "my_rule" in out, "adamw" in out) == (0, True, False)


def test_show(run: Run) -> None:
    code, out, _ = run("show", "lion", "--plan", "fp32", "--json")
    assert (code, list(as_json(out)["parts"])) == (0, ["program", "codec of p: bf16, nearest"])
    lines = run("show", "radam")[1].splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) < 300
    assert [line for line in lines if line.startswith("-- codec of p: bf16 and 8 more bits")]
    assert "buffer exp_avg f32 elem state exp_avg rw" in lines
    assert {line.partition("block=")[2] for line in lines if line.startswith("program ")} == {"1", "64"}


def test_explain_what_is_no_rule(run: Run) -> None:
    """Each code of an error and of the lint, and each plan, in the place of a rule."""
    said = {name: run("explain", name)[:2] for name in [*errors.TABLE, *load.plans(), "L1", "l9"]}
    assert {code for code, _ in said.values()} == {0}
    assert "declared with when=<when>" in said["E105"][1] and "8-bit signed blocks of 64" in said["int8_split24"][1]
    assert said["l9"][1].startswith("finding L9 of the lint\n    a running maximum")
    assert run("explain", "E999")[0] == 2


def test_check_shows_findings_of_the_plans_asked_for(run: Run) -> None:
    out = run("check", "lion")[1]
    assert "discouraged under " in out and "L1 error" not in out and "under fp32: L11 warning" in out
    assert "lion under bnb8: L1 error" in run("check", "lion", "--plan", "bnb8")[1]


def test_explain(run: Run) -> None:
    code, out, _ = run("explain", "adamw", "--json")
    data = as_json(out)
    assert (code, data["total"], len(data["sweeps"])) == (0, 5.0625, 1)
    assert {row["name"] for row in data["memory"]} == {"p", "exp_avg", "exp_avg_sq"}
    code, out, _ = run("explain", "adamw", "--plan", "flashoptim", "--flag", "amsgrad", "--param", "float16")
    assert code == 0
    for word in ("max_exp_avg_sq", "for the update: reads p", "L5 error", "discouraged", "B per parameter and step"):
        assert word in out


def test_fuzz_reports_the_worst_case_beside_its_bound(run: Run) -> None:
    code, out, _ = run("fuzz", "sgd", "--plan", "bf16_sr", "-n", "5", "--seed", "1", "--json")
    data = as_json(out)
    assert (code, data["holds"], data["reproduce"]) == (0, True, "")
    assert data["examples"] == 5
    assert all(0 <= w["ratio"] <= 1 and w["error"] <= w["bound"] for w in data["worst"])
    # Each worst case can be run again by itself.
    worst = data["worst"][0]
    code, out, _ = run("fuzz", "sgd", "--plan", "bf16_sr", "--case", worst["case"], "--json")
    again = next(w for w in as_json(out)["worst"] if w["value"] == worst["value"])
    assert (code, again["ratio"]) == (0, worst["ratio"])


def test_fuzz_fails_with_a_line_that_repeats_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SHRINK_SECONDS", 2.0)
    real = fuzz.Trial.run

    def wrong(self: Any, g: Any) -> None:
        real(self, g * (1 + 2.0**-10))  # a kernel that gets its gradients a little wrong

    monkeypatch.setattr(fuzz.Trial, "run", wrong)
    code, out, _ = run("fuzz", "sgd", "--plan", "fp32", "-n", "20", "--json")
    data = as_json(out)
    assert (code, data["holds"]) == (1, False)
    assert data["worst"][0]["ratio"] > 1
    assert data["reproduce"].startswith("optgen fuzz sgd --plan fp32 --backend reference --case ")
    case = data["reproduce"].split("--case ")[1].strip("'")
    assert run("fuzz", "sgd", "--plan", "fp32", "--case", case)[0] == 1
    monkeypatch.undo()
    assert run("fuzz", "sgd", "--plan", "fp32", "--case", case)[0] == 0


OWN = """
from dataclasses import dataclass
from optgen.formats import Field, Format, Plan
from optgen.lang.values import cast
from optgen.ops import dtypes

@dataclass(frozen=True)
class Mine(Format):
    def fields(self):
        return {"": Field(dtypes.bf16)}
    def encode(self, x, *, noise=None, root=None):
        return {"": cast(x, dtypes.bf16)}
    def decode(self, parts, *, root=None):
        return cast(parts[""], dtypes.f32)

mine = Plan("A format of the user's own.", signed=Mine())
"""


def test_fuzz_says_that_no_bound_is_known_of_a_format(project: Path, run: Run) -> None:
    (project / "specs").mkdir()
    (project / "specs/plans.py").write_text(OWN, encoding="utf-8")
    command = ("fuzz", "lion", "--plan", "mine", "-n", "2", "--steps", "1")
    code, out, err = run(*command)
    assert code == 1
    assert "no bound is known for Mine: what it kept of exp_avg was not checked" in err
    assert "2 examples, every other element within its bound" in out
    code, out, _ = run(*command, "--json")
    data = as_json(out)
    assert (code, data["holds"], data["unknown"], data["reproduce"]) == (1, False, {"exp_avg": "Mine"}, "")


def test_fuzz_in_tritons_interpreter(run: Run) -> None:
    for maths in ("strict", "fast"):
        words = ("sgd", "--plan", "int8_split24", "--backend", "triton", "--maths", maths, "-n", "3", "--steps", "1")
        code, out, err = run("fuzz", *words, "--json")
        assert (code, as_json(out)["holds"]) == (0, True), out + err


def test_doctor(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what is here, what is missing (exit code 3), and a cache that is not used."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, _ = run("doctor", "--json")
    lines = {line["what"]: line for line in as_json(out)["lines"]}
    assert code == 0 and {"optgen", "python", "torch", "triton", "gpu", "cache"} <= set(lines)
    assert lines["optgen"]["found"].startswith(optgen.__version__)
    assert "'no-such-compiler' is no C++ compiler" in lines["cpu"]["advice"]
    tmp_path.chmod(0o777)
    monkeypatch.setenv("OPTGEN_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="can be written by other users"):
        assert f"{tmp_path}  it is read-only, or others can write to it" in run("doctor")[1]
    monkeypatch.setattr(doctor, "NEEDED", ("no-such-package",))
    assert run("doctor")[0] == terminal.MISSING


def test_version_and_help(run: Run) -> None:
    assert run("--version")[:2] == (0, f"optgen {optgen.__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    for name in ("new", "build", "check", "list", "show", "explain", "fuzz", "convert", "verify-checkpoint", "doctor"):
        assert f"\n    {name}" in out
    assert run()[0] == terminal.WRONG_INPUT


def test_list_by_pattern_in_plain_columns(run: Run) -> None:
    code, out, _ = run("list", "adam*")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and out.isascii() and ["adamw", "AdamW"] in [row[:2] for row in rows]
    assert "Adam with decoupled weight decay." in out
    assert {"lion", "fp32"}.isdisjoint(row[0] for row in rows if row)
    assert "adamw" in optgen.list("adam*") and optgen.list() == optgen.list_rules()
    assert "int8_split24" in run("list", "int8*")[1]
    code, _, err = run("list", "adamv")
    assert (code, "did you mean 'adam" in err) == (2, True), err


def test_quiet_and_verbose(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("new", "adamw")
    noted = "it shadows a ready-made optimizer"
    (project / "specs/adamw.py").unlink()
    assert noted in run("new", "adamw")[2]
    (project / "specs/adamw.py").unlink()
    code, out, err = run("new", "adamw", "-q")
    assert (code, "specs/adamw.py" in out, err) == (0, True, "")
    code, _, err = run("explain", "adamv", "-q")
    assert (code, err.startswith("error[E404]: ")) == (2, True)
    monkeypatch.setattr(logging.getLogger("optgen"), "level", logging.WARNING)
    for words in (["explain", "adamv", "-v"], ["-qv", "explain", "adamv"]):
        err = run(*words)[2]
        assert "in find_spec" in err and "error[E404]: " in err


# -- wrong input
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["explain", "adamv"], "E404"), (["explain", "adamw", "--flag", "amsgrd"], "E411"),
        (["build", "lion"], "E411"), (["build", "--plan", "fp32"], "E411"), (["build"], "E414"),
        (["new", "sqrt"], "E409"), (["fuzz", "sgd", "--case", "{"], "E411"),
        (["fuzz", "sgd", "--case", '{"shapes": [3]}'], "E411"),
    ],
)  # fmt: skip
def test_a_users_mistake(project: Path, run: Run, words: list[str], code: str) -> None:
    exit_code, out, err = run(*words)
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"error[{code}]: ")
    assert "Traceback" not in err
    exit_code, out, err = run(*words, "--json")
    data = as_json(out)
    assert (exit_code, data["error"]["code"]) == (2, code)
    assert not list(project.iterdir())


@pytest.mark.parametrize("words", [["biuld"], ["explain"], ["build", "--no-such"], ["fuzz", "sgd", "-n", "0"]])
def test_a_wrong_option(run: Run, words: list[str]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "error: " in err
    assert "--help" in err
    code, out, _ = run(*words, "--json")
    assert (code, as_json(out)["exit"]) == (2, 2)


def test_an_error_in_a_spec_has_its_place(project: Path, run: Run) -> None:
    (project / "specs").mkdir()
    (project / "specs/bad.py").write_text("x = 1\ny = x +\n")
    code, out, err = run("build")
    assert code == 2
    assert "specs/bad.py:2" in err
    code, out, _ = run("check", "--json")
    (error,) = as_json(out)["errors"]
    assert code == 2
    assert set(error) >= {"code", "message", "places", "note", "hint"}
    assert error["code"].startswith("E")
    assert {"file", "line", "column"} <= set(error["places"][0])
    (project / "specs/bad.py").write_text("# -*- coding: no-such -*-\n")
    assert "error[E401]: " in run("explain", "specs/bad.py")[2]
    (project / "specs/bad.py").write_text("import math\n\nx = math.sqrt(-1)\n")
    code, out, err = run("explain", "bad")
    assert code == 2
    # A file without a spec in its text is none that can be named; by its path it says what is wrong.
    code, out, err = run("explain", "specs/bad.py")
    assert "E402" in err
    assert "specs/bad.py:3:5" in err


def test_what_a_spec_prints_is_no_part_of_the_object(project: Path, run: Run) -> None:
    run("new", "mine")
    file = project / "specs/mine.py"
    file.write_text("print('loading mine')\n" + file.read_text())
    for words in ("build", "check", "list"):
        load._loaded.clear()
        code, out, err = run(words, "--json")
        assert (code, as_json(out)["exit"], err) == (0, 0, "loading mine\n")
    load._loaded.clear()
    assert run("explain", "mine")[1].startswith("loading mine\n")
    file.write_text("print('loading mine')\n1 / 0\n")
    code, out, err = run("explain", "specs/mine.py", "--json")
    assert (code, as_json(out)["error"]["code"], err.splitlines()[0]) == (2, "E402", "loading mine")


def test_interrupting_a_spec_is_no_fault_of_it(project: Path, run: Run) -> None:
    run("new", "mine")
    (project / "specs/mine.py").write_text("raise KeyboardInterrupt\n")
    assert run("explain", "specs/mine.py")[0] == terminal.INTERRUPTED


RULE = """
@optimizer()
def r(p, g, *, lr=hyper(1e-3, ge=0)):
    p = p - {step}
    return p
"""
HEAD = "from optgen.lang import hyper, optimizer\n"


@pytest.mark.parametrize("words", ["check", "build", "list", "explain r"])
def test_two_specs_of_one_name(project: Path, run: Run, words: str) -> None:
    (project / "specs").mkdir()
    (project / "specs/r.py").write_text(HEAD + RULE.format(step="lr * g"))
    (project / "specs/r2.py").write_text(HEAD + RULE.format(step="unknown * g"))
    code, _, err = run(*words.split())
    assert (code, "E412" in err) == (2, True), err
    assert "specs/r.py:4" in err
    assert "specs/r2.py:4" in err
    assert not (project / "generated").exists()


def test_named_specs_are_built_to_a_folder_of_their_own(project: Path, run: Run) -> None:
    (project / "rules").mkdir()
    for name in ("one", "two"):
        (project / f"rules/{name}.py").write_text(HEAD + RULE.format(step="lr * g"))
    code, _, err = run("build", "rules/one.py", "rules/two.py", "--out", "made")
    assert (code, "E412" in err, "rules/one.py:4" in err, "rules/two.py:4" in err) == (2, True, True, True), err
    code, out, _ = run("build", "rules/one.py", "lion", "--plan", "fp32", "--out", "made")
    assert (code, out) == (0, "made: 16 written, 0 removed, 0 unchanged\n")
    assert run("build", "lion", "--plan", "bf16", "--out", "made")[0] == 0
    assert sorted(x.name for x in (project / "made").iterdir() if x.is_dir()) == ["lion", "plans"]


def test_a_class_under_optimizer_is_refused_by_name_and_by_project(project: Path, run: Run) -> None:
    (project / "specs").mkdir()
    (project / "specs/r.py").write_text(f"{HEAD}\n@optimizer()\nclass r:\n    pass\n")
    for words in (("check",), ("check", "r"), ("-q", "build")):
        code, _, err = run(*words)
        assert code == 2 and "E113" in err and "has no @optimizer" not in err, err


def test_check_counts_specs_with_errors_and_names_files_without_a_spec(project: Path, run: Run) -> None:
    (project / "specs").mkdir()
    (project / "specs/r.py").write_text(HEAD + RULE.format(step="lr * g").replace("@optimizer()", ""))
    for words in ("check", "build", "list"):
        for quiet in ((), ("-q",)):
            code, _, err = run(*quiet, words)
            assert ("specs/r.py has no @optimizer" in err, code) == (True, 2 if words == "build" else 0)
    for name in ("a", "b", "c"):
        step = "lr * g" if name == "c" else "unknown * g"
        (project / f"specs/{name}.py").write_text(HEAD + RULE.format(step=step).replace("r(p", f"{name}(p"))
    code, _, err = run("check")
    assert (code, "specs/r.py has no @optimizer" in err, "2 of 3 specs have errors" in err) == (2, True, True), err
    code, out, _ = run("check", "--json")
    assert (code, len(as_json(out)["errors"])) == (2, 2)


def test_what_plans_share_is_said_once(project: Path, run: Run) -> None:
    run("new", "mine")
    _, out, _ = run("check", "mine", "--plan", "int8", "--plan", "fp32")
    assert [line.split(":")[0] for line in out.splitlines() if "L11" in line] == ["mine under int8, fp32"]


def test_new_overwrites_nothing_and_says_what_it_shadows(project: Path, run: Run) -> None:
    assert "shadows a ready-made optimizer: `adamw`" in run("new", "adamw")[2]
    assert run("new", "mine")[2] == ""
    (project / "specs/mine.py").write_text("# mine\n")
    code, _, err = run("new", "mine")
    assert (code, "E408" in err) == (2, True)
    assert (project / "specs/mine.py").read_text() == "# mine\n"


def test_a_fault_of_ours_is_seventy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "doctor", broken)
    code, out, err = run("doctor", "--json")
    assert (code, as_json(out)["exit"]) == (70, 70)
    assert "boom" in err


def test_a_file_that_may_not_be_read_is_named(project: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("new", "mine")
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "mine.py":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert run("explain", "mine") == (2, "", "error[E417]: specs/mine.py cannot be read: Permission denied\n")
    code, out, _ = run("list", "--json")
    assert (code, [s["does"] for s in as_json(out)["specs"] if s["name"] == "mine"]) == (0, ["error E417"])


def test_what_is_built_is_judged_and_printed_without_torch(tmp_path: Path) -> None:
    """To import it takes a second, and no format of a ready-made plan is looked at from outside; help needs less."""
    code = (
        "import sys\nfrom optgen.driver.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'torch', 'sympy', 'jinja2', 'optgen.lang'} & set(sys.modules)\n"
        "assert main(['build', 'lion', '--out', 'made']) == 0\nassert 'torch' not in sys.modules\n"
    )
    python(code, cwd=tmp_path)


# -- finding things
def test_own_specs_and_plans_come_first(project: Path) -> None:
    (project / "specs").mkdir()
    text = (ROOT / "specs/lion.py").read_text()
    (project / "specs/lion.py").write_text(text.replace("lr=hyper(1e-4", "lr=hyper(7e-4"))
    (project / "specs/plans.py").write_text(
        "from optgen.formats import Plan, floats\n"
        'tiny = Plan("Mine.", signed=floats.bf16_auto, nonneg=floats.bf16_auto)\n'
    )
    assert load.find_spec("lion").hyper("lr").default == 7e-4
    assert load.find_spec(ROOT / "specs/lion.py").hyper("lr").default == 1e-4
    assert load.find_spec("adamw").name == "adamw"
    plans = load.plans()
    assert list(plans)[-1] == "tiny"
    assert load.find_plan("specs/plans.py:tiny") is plans["tiny"]


def test_a_changed_file_is_loaded_again(project: Path) -> None:
    file = project / "mine.py"
    text = (ROOT / "specs/lion.py").read_text()
    file.write_text(text)
    first = load.find_spec(file)
    assert load.find_spec(file) is first
    file.write_text(text.replace("lr=hyper(1e-4", "lr=hyper(25e-5"))
    assert load.find_spec(file).hyper("lr").default == 25e-5


def test_files_import_their_neighbours(project: Path) -> None:
    (project / "specs").mkdir()
    (project / "specs/helper_of_mine.py").write_text("def half(x):\n    return 0.5 * x\n")
    (project / "specs/json.py").write_text("raise AssertionError('the standard library comes first')\n")
    text = (ROOT / "specs/lion.py").read_text().replace("def lion", "def mine")
    imports = "import json\nfrom helper_of_mine import half\nfrom specs.helper_of_mine import half as same\n"
    (project / "specs/mine.py").write_text(imports + text)
    before, beside = list(sys.path), list(specs.__path__)
    assert load.find_spec("mine").name == "mine"
    assert sys.path == before
    assert list(specs.__path__) == beside
