"""The wheel of a user: the ready-made optimizers, their specs, and the way to a project of their own."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from optgen.base import ready
from tests import harness

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, as pip would unpack it; built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("optgen-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture
def python(installed: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs code in a folder of its own, with the unpacked wheel before everything else on the path."""
    return partial(harness.python, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)})


def test_wheel_holds_everything_that_the_checkout_has(installed: Path) -> None:
    for here, there in (("optgen", "optgen"), ("specs", "optgen/_specs")):
        for path in sorted((ROOT / here).rglob("*")):
            relative = path.relative_to(ROOT / here)
            if path.is_file() and "__pycache__" not in relative.parts:
                assert (installed / there / relative).read_bytes() == path.read_bytes(), relative
    assert {p.name.partition("-")[0] for p in installed.iterdir()} == {"optgen"}
    types = (installed / "optgen/optim/__init__.pyi").read_text(encoding="utf-8")
    assert types.count("\nclass ") == len(ready.classes())


@pytest.mark.parametrize(
    "names",
    [("AdaHessian", "CAME"), pytest.param(tuple(ready.classes()), marks=pytest.mark.full)],
)
def test_ready_made_optimizers_step_without_the_compiler(
    installed: Path, python: Callable[..., str], names: tuple[str, ...]
) -> None:
    """Run what was generated before. Triton is not imported either: CPU builds of torch lack it."""
    code = f"""
        names = {names}
        import sys
        import warnings
        import torch
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # torch itself loads SymPy here
        for name in ("triton", *sys.argv[1:]):
            sys.modules[name] = None  # its import fails
        import optgen
        from optgen import optim
        from optgen.runtime.cpu import cpu
        from optgen.runtime.layout.plans import load
        assert optgen.__file__.startswith({str(installed)!r})
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # plans that are discouraged
        for made in (getattr(optim, name) for name in names):
            for plan in made.PLANS:
                p = torch.nn.Parameter(torch.full((33, 128), 0.5, dtype=torch.bfloat16))
                p.grad = torch.full_like(p, 0.25)
                assert cpu.has_kernels(load(made, plan))
                optimizer = made([p], lr=0.25, plan=plan, backend="reference")
                optimizer.feed(**dict.fromkeys(made.INPUTS, torch.ones_like))
                optimizer.step()
                assert p.isfinite().all() and optimizer.state[p]["step"] == 1, (made, plan)
            print(len(made.PLANS))
    """
    compiler = "optgen.driver.compile", "optgen.backends", "optgen.lang", "sympy", "jinja2"
    assert python(code) == python(code, *compiler) == f"{len(ready.plans())}\n" * len(names)


def test_a_project_of_ones_own(python: Callable[..., str], tmp_path: Path) -> None:
    out = python("""
        import sys
        from optgen.driver.cli import main
        assert main(["new", "mine"]) == main(["build"]) == 0
        sys.path.insert(0, "")
        import torch
        import generated
        from generated import Mine
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16))
        start = p.detach().clone()
        opt = Mine([p])
        for _ in range(3):
            p.grad = torch.randn_like(p)
            opt.step()
        assert torch.isfinite(p).all() and not torch.equal(p, start)
        print(generated.__file__)
    """)
    assert str(tmp_path) in out
