"""`optgen build`: the same bytes every time, all of it or nothing, and never over somebody's edits."""

import ast
import inspect
import json
import linecache
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from optgen.base.errors import UserError
from optgen.driver.build import HASHES, MANIFEST, Outcome, Request, build, digest
from optgen.runtime import stale as stale_code
from tests.harness import ROOT, python, texts


def rule(name: str, lr: str = "1e-3", cls: str = "") -> str:
    """A small spec with one state."""
    named = f', name="{cls}"' if cls else ""
    return f'''"""A rule of the tests."""

from optgen.lang import hyper, optimizer, state


@optimizer(cite="a test"{named})
def {name}(p, g, m=state(), *, lr=hyper({lr}, ge=0), beta=hyper(0.9, ge=0, lt=1)):
    m = beta * m + (1 - beta) * g
    p = p - lr * m
    return p, m
'''


STUCK = """
from optgen.formats import Blocked, Plan
stuck = Plan("Nearest.", signed=Blocked(8, 64, rounding="nearest"))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, with specs/ of two rules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for name in ("first", "second"):
        (tmp_path / "specs" / f"{name}.py").write_text(rule(name))
    return tmp_path


def run(**options: object) -> Outcome:
    return build(Request(**options))  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- what is built
def test_a_project_without_a_table_builds_its_specs_under_two_plans(project: Path) -> None:
    run()
    files = set(content(project / "generated"))
    assert {x.split("/")[1] for x in files if x.startswith("plans/")} == {"fp32", "int8_split24"}
    assert files >= {"__init__.py", MANIFEST, "first/__init__.py", "second/triton.py"}


def test_an_author_may_write_quotes_and_backslashes(project: Path) -> None:
    """The docstring of the class holds his words as they are; names of builtins are his to use."""
    text = rule("first").replace('"a test"', '\'see """x""" in C:\\\\new\'').replace("beta", "float")
    comment = '    m = m + 0.0  # not the end: """ nor */\n    p = p - lr * m'
    (project / "specs/first.py").write_text(text.replace("    p = p - lr * m", comment))
    run(names=("first",), plans=("fp32",))
    made = ast.parse((project / "generated/first/__init__.py").read_text())
    (cls,) = [node for node in made.body if isinstance(node, ast.ClassDef)]
    said = ast.get_docstring(cls) or ""
    assert 'see """x""" in C:\\new' in said
    for file in (project / "generated/first/fp32").glob("*.py"):
        ast.parse(file.read_text())


def test_the_table_decides(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        '[tool.optgen]\nout = "made"\n'
        'build = [{ specs = ["f*"], plans = ["fp32"] }, { specs = ["lion"], plans = ["bf16*"] }]\n'
    )
    assert (run().classes, run().skipped) == (["First", "Lion"], [])
    files = content(project / "made")
    assert {name.split("/")[0] for name in files if "/" in name} == {"first", "lion", "plans"}
    assert "plans/bf16_sr/__init__.py" in files
    assert str(project) not in "".join(text.decode() for text in files.values())


def test_the_folder_it_runs_in_changes_no_byte(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the project, from below it, and from a folder that has nothing to do with it."""
    file = project / "specs" / "first.py"
    made = {}
    for folder in (project, project / "specs", tmp_path_factory.mktemp("elsewhere")):
        monkeypatch.chdir(folder)
        out = tmp_path_factory.mktemp("out")
        run(names=(os.path.relpath(file), "fromage"), plans=("fp32",), out=str(out))
        made[folder] = content(out)
    assert b"specs/first.py" in made[project]["first/triton.py"]
    assert all(files == made[project] for files in made.values())


def test_a_manifest_that_optgen_did_not_write_is_refused(project: Path) -> None:
    """A build would remove the files that it lists, and these may be somebody's."""
    run()
    precious = project / "precious.txt"
    precious.write_text("mine\n")
    (project / "specs/second.py").unlink()  # something to remove
    manifest = project / "generated" / MANIFEST
    whole = manifest.read_bytes()
    data = json.loads(whole)
    (project / "generated/linked").symlink_to(project)
    names = ["../precious.txt", "first/../../precious.txt", str(precious), "linked/precious.txt"]
    forged = {json.dumps(data | {"files": data["files"] | {x: digest(b"mine\n")}}).encode(): repr(x) for x in names}
    damaged = dict.fromkeys((whole[:-5], b"[]", b"\xff", b'{"fil": {}}'), "MANIFEST.json cannot be read")
    for text, says in (damaged | forged).items():
        manifest.write_bytes(text)
        before = content(project)
        for check in (False, True):
            with pytest.raises(UserError) as caught:
                run(check=check)
            assert (caught.value.code, says in caught.value.message) == ("E415", True)
        assert content(project) == before


def test_a_pattern_leaves_out_what_does_not_fit_and_a_name_is_refused(project: Path) -> None:
    (project / "specs/plans.py").write_text(STUCK)
    outcome = run(names=("first",), plans=("fp32", "stuck*"))
    assert len(outcome.skipped) == 1
    assert "stuck" in outcome.skipped[0]
    before = content(project / "generated")
    with pytest.raises(UserError, match="E307"):
        run(names=("first",), plans=("stuck",))
    assert content(project / "generated") == before
    (project / "specs/plans.py").write_text(STUCK.replace('"))', '"), discouraged="a test")'))
    run(names=("first",), plans=("stuck",))
    assert "\nDISCOURAGED = {" in (project / "generated/first/stuck/__init__.py").read_text()  # who uses it is warned


# -- all or nothing
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def broken(:\n", "E401"),
        (rule("second") + "1 / 0\n", "E402"),
        (rule("second").replace("p, m\n", "m, p\n"), "E120"),
    ],
)
def test_a_failing_build_leaves_everything_as_it_was(project: Path, text: str, code: str) -> None:
    run()
    before = content(project / "generated")
    (project / "specs/first.py").write_text(rule("first", "5e-3"))  # would change files
    (project / "specs/second.py").write_text(text)
    with pytest.raises(UserError) as caught:
        run()
    assert caught.value.code == code
    assert content(project / "generated") == before
    assert not list(project.glob(".optgen-*"))


_KILLED = """
import os, sys
from optgen.driver.build import Request, build

real, left = os.replace, [int(sys.argv[1])]

def replace(a, b):
    left[0] -= 1
    if left[0] < 0:
        os._exit(9)  # as by SIGKILL: nothing is cleaned up
    real(a, b)

os.replace = replace
build(Request())
"""


@pytest.mark.parametrize("moved", [0, 2])
def test_a_build_goes_on_after_one_that_was_killed(project: Path, moved: int) -> None:
    run(names=("first",))
    before = content(project / "generated")
    (project / "specs/first.py").write_text(rule("first", "5e-3"))  # changes files, and second makes new ones
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", _KILLED, str(moved)], env=path, check=False).returncode == 9
    assert (content(project / "generated") == before) == (moved == 0)
    run()
    assert run(check=True).clean and run(out="anew").classes
    assert content(project / "generated").keys() == content(project / "anew").keys()


def test_edited_files_are_not_overwritten(project: Path) -> None:
    run()
    edited = project / "generated/first/__init__.py"
    edited.write_text(edited.read_text() + "# mine\n")
    before = content(project / "generated")
    (project / "specs/first.py").write_text(rule("first", "5e-3"))
    with pytest.raises(UserError, match="E406") as caught:
        run()
    assert "first/__init__.py" in str(caught.value)
    assert content(project / "generated") == before
    edited.unlink()
    run()
    assert run(check=True).clean


def test_line_ends_are_no_edit(project: Path) -> None:
    run()
    for file in (project / "generated").rglob("*.py"):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert run(check=True).clean
    assert digest(b"a\r\nb") == digest(b"a\nb")


# -- check
def test_check_says_what_differs_and_writes_nothing(project: Path) -> None:
    outcome = run(check=True)
    assert not outcome.clean
    assert not (project / "generated").exists()
    run()
    assert run(check=True).clean
    (project / "specs/first.py").write_text(rule("first", "5e-3"))
    before = content(project / "generated")
    outcome = run(check=True)
    assert "first/__init__.py" in outcome.written
    assert '-        Hyper("lr", 0.001, ge=0.0),' in outcome.diff
    assert content(project / "generated") == before


# -- the bytes
def build_elsewhere(folder: Path, seed: str, *names: str) -> dict[str, bytes]:
    """A build in a process of its own, under a hash seed."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "optgen", "build", *names, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return content(folder)


def test_the_same_bytes_under_any_hash_seed_order_and_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = build_elsewhere(tmp_path / "one", "1", "came", "nadam", "lion")
    monkeypatch.chdir(ROOT)
    run(names=("lion", "nadam"), out=str(tmp_path / "two"))
    two = content(tmp_path / "two")
    assert len(one) > 10
    assert {name for name, text in two.items() if one[name] != text} == {"__init__.py", MANIFEST}


def test_no_file_tells_of_this_machine(project: Path) -> None:
    run(names=("first", "adamw"), plans=("int8_split24",))
    text = "".join(v.decode() for v in content(project / "generated").values())
    for word in (str(project), str(ROOT), str(Path.home()), os.uname().nodename):
        assert word not in text or word in ("/", "")
    assert "specs/adamw.py" in text


# -- what is built works
def test_the_package_imports_one_optimizer_at_a_time(project: Path) -> None:
    """It compares each with its sources."""
    (project / "specs/third.py").write_text(rule("third"))
    (project / "specs/plans.py").write_text("from optgen.formats import Plan\n\nmine = Plan('A plan.')\n")
    names = "specs/first.py", "second", "third"
    run(names=names, plans=("fp32", "mine"))
    code = """
        import os, sys, generated
        assert dir(generated) == generated.__all__ == ['First', 'Second', 'Third']
        assert 'torch' not in sys.modules
        from generated import First
        assert 'generated.first' in sys.modules and 'generated.second' not in sys.modules
        assert not {'sympy', 'jinja2', 'optgen.lang', 'optgen.driver'} & set(sys.modules)
        import torch
        p = torch.nn.Parameter(torch.ones(100, 64, dtype=torch.bfloat16)); p.grad = torch.ones_like(p)
        First([p], lr=0.5).step()
        assert (p < 1).all()
        try:
            generated.Frist
        except AttributeError as e:
            print(e)
        try:
            from generated import Frist
        except ImportError as e:
            print(e)
        from generated import second
        from pathlib import Path
        Path('specs/third.py').write_text(Path('specs/third.py').read_text() + '# changed')
        try:
            from generated import Third
        except ImportError as e:
            print(e)
        os.environ['OPTGEN_STALE'] = 'ignore'
        from generated import Third
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPTGEN_STALE": "error"}
    said = python(code, cwd=project, env=env)
    assert said.count("has no optimizer 'Frist'; it has: First, Second, Third") == 2
    (stale,) = said.splitlines()[2:]
    assert stale.startswith("specs/third.py changed since generated/third")


def test_rules_may_have_the_names_that_a_generated_folder_imports(project: Path) -> None:
    for name in ("any", "importlib", "typing"):
        (project / f"specs/{name}.py").write_text(rule(name))
    run()
    code = "import generated; print([getattr(generated, n).__module__ for n in ('Importlib', 'Any', 'Typing')])"
    found = python(code, cwd=project, env={**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT}"})
    assert found.strip() == "['generated.importlib', 'generated.any', 'generated.typing']"


@pytest.mark.parametrize(
    ("name", "plan", "taken"),
    [("stage", "own", "Stage"), ("first", "strict", "strict"), ("first", "STEPS", "STEPS"), ("first", "torch", "torch")]
)
def test_a_class_or_a_plan_is_called_as_nothing_else_in_its_module(
    project: Path, name: str, plan: str, taken: str
) -> None:
    (project / "specs/first.py").write_text(rule(name))
    (project / "specs/plans.py").write_text(f"from optgen.formats import Plan\n\n{plan} = Plan('A plan.')\n")
    with pytest.raises(UserError, match=f"E115.*`{taken}` cannot be used"):
        run(names=(name,), plans=(plan,))
    assert not (project / "generated").exists()


def stale(project: Path, name: str) -> str:
    """Return the warning of an import of a class from the project's generated folder."""
    stale_code.check.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            stale_code.check(str(project / "generated"), name)
    assert len(caught) <= 1, "said more than once"
    return str(caught[0].message) if caught else ""


def test_a_spec_that_changed_since_the_build_is_told_of(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's own files, where they are there; a ready-made one is not compared."""
    plan = 'from optgen.formats import Plan\n\nmine = Plan("A plan.")\n'
    (project / "specs/plans.py").write_text(plan)
    table = 'build = [{ specs = ["first"], plans = ["mine"] }, { specs = ["lion", "second"], plans = ["fp32"] }]'
    (project / "pyproject.toml").write_text(f"[tool.optgen]\n{table}\n")
    run()
    assert stale(project, "first") == stale(project, "second") == stale(project, "lion") == ""
    (project / "specs/first.py").write_text(rule("first", "2e-3"))
    said = "specs/first.py changed since generated/first was built from it; build it again as it was built "
    assert stale(project, "first").startswith(said)
    assert stale(project, "second") == ""
    monkeypatch.setenv("OPTGEN_STALE", "ignore")
    assert stale(project, "first") == ""
    monkeypatch.setenv("OPTGEN_STALE", "error")
    with pytest.raises(ImportError, match="or `optgen build SPEC --out FOLDER`"):
        stale(project, "first")
    monkeypatch.setenv("OPTGEN_STALE", "never")
    with pytest.raises(ValueError, match="one of warn, error, ignore, got 'never'"):
        stale(project, "first")
    monkeypatch.delenv("OPTGEN_STALE")
    (project / "specs/first.py").unlink()
    assert stale(project, "first") == ""
    (project / "specs/plans.py").write_text(plan.replace("A plan", "My plan"))
    assert "specs/plans.py changed since generated/first was built from it; build it again" in stale(project, "first")


def test_the_repository_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    outcome = build(Request(check=True))
    assert outcome.clean, f"run `optgen build`: {outcome.diff[:2000]}"


def test_hashes_tell_of_a_rule_that_is_not_built(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.optgen]\nhashes = true\nbuild = [{ specs = ['first'], plans = ['fp32'] }]\n"
    )
    (project / "specs/plans.py").write_text(STUCK.replace('"))', '"), discouraged="a test")'))
    run()
    known = (project / "generated" / HASHES).read_text()
    assert [line.partition(" ")[0] for line in known.splitlines()] == ["plans/stuck", "first", "second"]
    assert run(check=True).clean
    (project / "specs/second.py").write_text(rule("second", "2e-3"))
    outcome = run(check=True)
    assert outcome.written == [HASHES, MANIFEST]
    assert "\n+second " in outcome.diff and "\n+first " not in outcome.diff


def test_kernels_are_compiled_for_all_whole_numbers_at_once() -> None:
    """Triton compiles a kernel again for a whole number that 16 divides, or that is 1, unless it is told not to.  The
    key of a step's noise has its place in the window in its lowest bits: 16 divides that of the first step, not that of
    the second."""
    launched = 0
    head = re.compile(r"^@triton\.jit(?:\((.*)\))?\ndef (\w+)\(\s*table, work,((?:[^)]|\)[^:])*)\):", re.MULTILINE)
    for path in texts("specialized", "triton.py", plans=False):
        for told, name, parameters in head.findall(path.read_text(encoding="utf-8")):
            # Those of fixed types are never specialized, or always.
            fixed = r"tl\.(constexpr|float32)"
            given = parameters.split("SWEEP:")[0].split(",")  # the record of the sweep is the last one
            plain = [x.split(":")[0].strip() for x in given if x.strip() and not re.search(fixed, x)]
            assert told == (f"do_not_specialize={json.dumps(plain)}" if plain else ""), (path, name)
            launched += bool(plain)
    assert launched > 100


def test_triton_keeps_a_compiled_kernel_under_all_of_its_sweep() -> None:
    """On disk a constant counts by its `cache_key`, or by its text: two sweeps that differ in anything have two."""
    from dataclasses import fields, replace

    from optgen.runtime.gpu.walk import KernelSweep

    one = KernelSweep(9, 3, ((0, None),))
    others = [KernelSweep(9, 3, ((0, None, "block"),))]
    names = [f.name for f in fields(one) if f.name not in ("values", "views")]  # see tests/test_join.py
    others += [replace(one, **{name: "another"}) for name in names]  # type: ignore[arg-type]
    assert len({x.cache_key for x in (one, *others)}) == 1 + len(others)
    assert KernelSweep(9, 3, ((0, None),)).cache_key == one.cache_key


# -- compiling in memory
def test_compile_in_memory(project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import optgen

    monkeypatch.setenv("OPTGEN_CACHE", str(project / "cache/optgen"))
    with caplog.at_level("INFO", logger="optgen"):
        cls = optgen.compile("specs/first.py", plan="int8_split24")
        assert cls is optgen.compile("specs/first.py", plan="int8_split24")
    assert [r.getMessage() for r in caplog.records] == ["generating First under plan int8_split24"]
    assert cls.PLANS == ("int8_split24",)
    source = sys.modules[cls.__module__].__file__
    assert source is not None
    assert Path(source).is_relative_to(project / "cache/optgen")
    assert (project / "cache/optgen").stat().st_mode & 0o777 == 0o700
    p = torch.nn.Parameter(torch.ones(64, 64))
    opt = cls([p], lr=0.5, plan="fp32")  # a plan that was not compiled ahead
    p.grad = torch.ones_like(p)
    opt.step()
    assert "m" in opt.state[p]
    with pytest.raises(ValueError, match="did you mean 'fp32'") as caught:
        cls([p], plan="fp23")
    assert caught.value.__cause__ is None, "a second traceback with the same text"


def test_a_rule_in_a_notebook_does_not_get_the_notebooks_docstring(project: Path) -> None:
    import optgen

    cell = "<a cell>"
    text = rule("first").replace('"""A rule."""', "")
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    notebook: dict[str, Any] = {"__doc__": "Automatically created module for IPython", "__name__": "__main__"}
    exec(compile(text, cell, "exec"), notebook)
    assert repr(notebook["first"]) == "Spec('first', <a cell>:7)"
    doc = inspect.getdoc(optgen.compile(notebook["first"], plan="fp32"))
    assert doc is not None
    assert doc.startswith("The rule first.")
